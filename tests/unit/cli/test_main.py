"""The command line has all its commands, and parses lines with a script's own arguments."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ir.example_plans import inference
from tests.unit.report.sample_reports import make_full_report
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Parser, split
from whale_nebula.cli.main import COMMANDS, main
from whale_nebula.cli.run import make_parser
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL
from whale_nebula.report.records import RunTotals
from whale_nebula.report.saved import json_line

# Commands that must not load TensorFlow, or any of the listed modules; one process runs all of them.
LIGHT_SCRIPT = """
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


def test_light_commands_load_no_tensorflow(tmp_path: Path) -> None:
    inference().save(tmp_path / "plan.json")
    (tmp_path / "run.jsonl").write_text(json_line(replace(make_full_report(), step=1, run=RunTotals(1))) + "\n")
    code = "import sys\nfrom whale_nebula.cli.main import main\n" + LIGHT_SCRIPT
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert all(command in result.stdout for command in COMMANDS)
    assert "plan of predict\n" in result.stdout and "fit in gpu/0: " in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "exit status:" in out and f"whale-nebula {command}" in out


def test_closed_output_pipe_is_no_error() -> None:
    """As in `whale-nebula doctor | head -1`."""
    command = [sys.executable, "-m", "whale_nebula.cli.main", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, "")


def test_python_m_runs_the_command() -> None:
    command = [sys.executable, "-m", "whale_nebula", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.split()[0]) == (0, "whale-nebula")


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_split_separates_options_script_and_arguments(
    line: str, options: str, script: str | None, arguments: str
) -> None:
    found = split(line.split(), OPTIONS)
    assert found == (options.split(), script, arguments.split())


@pytest.mark.parametrize(("word", "meant"), [("--jsn", "--json"), ("--link", "--links")])
def test_misspelt_or_abbreviated_option_is_refused(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Parser("it", "", OPTIONS).read([word, "10mbit"])
    assert ended.value.code == 2
    assert f"unknown option '{word}'; did you mean '{meant}'?" in capsys.readouterr().err


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operating.md").read_text()
SIGNALLED = [arguments.SIGNALLED + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]


def test_operating_page_lists_the_exit_codes_of_run() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE)
    listed = [int(code) for row in rows for code in row.split(",")]
    killed = arguments.shell_code(-signal.SIGKILL)
    assert listed == [
        arguments.DONE,
        arguments.USAGE,
        arguments.NO_FILE,
        arguments.USED_UP,
        arguments.LEFT,
        arguments.CONFIG,
        *SIGNALLED,
        killed,
    ]


def test_help_of_run_lists_its_exit_codes() -> None:
    listed = {int(code) for code in re.findall(r"\b\d+\b", make_parser().epilog.partition("exit status:")[2])}
    assert listed >= {arguments.DONE, arguments.USAGE, arguments.NO_FILE, arguments.LEFT, arguments.CONFIG, *SIGNALLED}


def test_workers_and_launcher_use_the_same_exit_codes() -> None:
    assert (EXIT_TEMPFAIL, SIGNALLED[1]) == (arguments.LEFT, arguments.INTERRUPTED)
    assert [arguments.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    script, done = tmp_path / "train.py", tmp_path / "done"
    script.write_text(f"import sys\nprint('out')\nprint('err', file=sys.stderr)\nopen({str(done)!r}, 'w').close()\n")
    command = f'"$0" -m whale_nebula run --all --clusters gpu "$1" {closed}'
    result = subprocess.run(["sh", "-c", command, sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, done.exists()) == (0, True), result.stderr
    assert result.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "out\n")
