"""Parsing of command lines with a script's own arguments, and documented exit codes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Parser, misspelt, split
from whale_nebula.cli.run import parser
from whale_nebula.launch.ending import EXIT_LEFT

OPTIONS = {"--json": (None, ""), "--links": ("LINE", ""), "--html": ("FILE", "")}


@pytest.mark.parametrize(
    ("line", "options", "script", "arguments"),
    [
        ("train.py", "", "train.py", ""),
        ("--json train.py", "--json", "train.py", ""),
        ("train.py --json", "--json", "train.py", ""),
        ("train.py --epochs 3 -v data.csv", "", "train.py", "--epochs 3 -v data.csv"),
        ("train.py 1 --links 10mbit 2", "--links 10mbit", "train.py", "1 2"),
        ("--links=10mbit train.py", "--links=10mbit", "train.py", ""),
        ("train.py -- --json --", "", "train.py", "--json --"),
        ("-- train.py --json", "", "train.py", "--json"),
        ("--jsn train.py", "--jsn", "train.py", ""),
        ("train.py --html", "--html", "train.py", ""),
        ("", "", None, ""),
    ],
)
def test_splitting(line: str, options: str, script: str | None, arguments: str) -> None:
    found = split(line.split(), OPTIONS)
    assert found == (options.split(), script, arguments.split())


@pytest.mark.parametrize(("word", "meant"), [("--jsn", "--json"), ("--link", "--links")])
def test_a_misspelt_option_is_told_and_nothing_is_abbreviated(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        Parser("it", "", OPTIONS).read([word, "10mbit"])
    assert ended.value.code == 2
    assert f"there is no option '{word}'; did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py --htlm a.html", [("--htlm", "--html")]),
        ("train.py --link=10mbit", [("--link", "--links")]),
        ("train.py --epochs 3 --lr 0.1 -v --link-rate 3", []),
        ("train.py --html a.html", []),
        ("train.py -- --htlm a.html", []),
        ("train.py data.htlm", []),
    ],
)
def test_what_goes_to_the_script_and_looks_like_ours(line: str, said: list[tuple[str, str]]) -> None:
    argv = line.split()
    assert misspelt(argv, split(argv, OPTIONS), ["--html", "--json", "--links", "--steps"]) == said


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
        arguments.USED_UP,
        arguments.LEFT,
        arguments.CONFIG,
        *SIGNALLED,
        killed,
    ]


def test_so_has_its_help() -> None:
    told = {int(code) for code in re.findall(r"\b\d+\b", parser().epilog.partition("exit status:")[2])}
    assert told >= {arguments.DONE, arguments.USAGE, arguments.NO_FILE, arguments.LEFT, arguments.CONFIG, *SIGNALLED}


def test_workers_end_with_the_same_numbers() -> None:
    assert (EXIT_LEFT, SIGNALLED[1]) == (arguments.LEFT, arguments.INTERRUPTED)
    assert [arguments.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
