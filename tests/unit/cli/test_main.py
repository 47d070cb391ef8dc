"""The command line has all its commands, and parses lines with a script's own arguments."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ir.traced import inference
from tests.unit.report.making import full
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Parser, split
from whale_nebula.cli.main import COMMANDS, main
from whale_nebula.cli.run import make_parser
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL
from whale_nebula.report.records import RunTotals
from whale_nebula.report.saved import line

# Commands that need no TensorFlow, and what they load none of; one process runs them all, one after the other.
LIGHT = """
def run(least, *words):
    code = main(words)
    assert not code and not least & set(sys.modules), (words, code, least & set(sys.modules))
bare = {"tensorflow", "keras", "grpc", "numpy"}
run(bare)
run(bare, "doctor")
run(bare, "certs", "init", "--run", "mt")
run(bare, "certs", "issue", "--cluster", "gpu")
run(bare, "certs", "show")
import whale_nebula.cli.bench, whale_nebula.cli.doctor_cluster
for how in (["--text"], ["--json"], ["--html", "plan.html"]):
    run({"tensorflow", "keras"}, "show", "plan.json", *how)
run({"tensorflow", "keras"}, "show", "--report", "run.jsonl")
"""


def test_commands_that_need_no_tensorflow_load_none(tmp_path: Path) -> None:
    inference().save(tmp_path / "plan.json")
    (tmp_path / "run.jsonl").write_text(line(replace(full(), step=1, run=RunTotals(1))) + "\n")
    code = "import sys\nfrom whale_nebula.cli.main import main\n" + LIGHT
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)
    assert "plan of predict\n" in done.stdout and "fit in gpu/0: " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_built_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "examples:" in told and "exit status:" in told and f"whale-nebula {command}" in told


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `whale-nebula doctor | head -1`."""
    command = [sys.executable, "-m", "whale_nebula.cli.main", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, "")


def test_python_m_is_the_command_too() -> None:
    command = [sys.executable, "-m", "whale_nebula", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[0]) == (0, "whale-nebula")


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shw"])
    assert ended.value.code == 2
    assert "unknown command 'shw'; did you mean 'show'?" in capsys.readouterr().err


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
    assert f"unknown option '{word}'; did you mean '{meant}'?" in capsys.readouterr().err


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
    told = {int(code) for code in re.findall(r"\b\d+\b", make_parser().epilog.partition("exit status:")[2])}
    assert told >= {arguments.DONE, arguments.USAGE, arguments.NO_FILE, arguments.LEFT, arguments.CONFIG, *SIGNALLED}


def test_workers_end_with_the_same_numbers() -> None:
    assert (EXIT_TEMPFAIL, SIGNALLED[1]) == (arguments.LEFT, arguments.INTERRUPTED)
    assert [arguments.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
