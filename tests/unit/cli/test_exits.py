"""Exit codes are what the pages say."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from whale_nebula.cli import arguments
from whale_nebula.cli.run import parser
from whale_nebula.launch.attach import EXIT_ORPHANED
from whale_nebula.launch.leaving import EXIT_LEFT

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operating.md").read_text()
SIGNALLED = [arguments.SIGNALLED + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]


def test_the_operators_page_has_those_of_run() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE)
    told = [int(code) for row in rows for code in row.split(",")]
    killed = arguments.shell_code(-signal.SIGKILL)
    assert told == [
        arguments.DONE,
        arguments.USAGE,
        arguments.NO_FILE,
        arguments.LEFT,
        arguments.CONFIG,
        *SIGNALLED,
        killed,
    ]


def test_so_has_its_help() -> None:
    told = {int(code) for code in re.findall(r"\b\d+\b", parser().epilog.partition("exit status:")[2])}
    assert told >= {arguments.DONE, arguments.USAGE, arguments.NO_FILE, arguments.LEFT, arguments.CONFIG, *SIGNALLED}


def test_workers_end_with_the_same_numbers() -> None:
    assert (EXIT_LEFT, EXIT_ORPHANED, SIGNALLED[1]) == (arguments.LEFT, arguments.ORPHANED, arguments.INTERRUPTED)
    assert [arguments.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
