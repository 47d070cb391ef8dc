"""`whale-nebula show --report FILE` prints what a file of reports says, without TensorFlow."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.making import full
from whale_nebula.cli.main import main
from whale_nebula.cli.show_script import show_report
from whale_nebula.errors import StateError
from whale_nebula.report.records import RunTotals
from whale_nebula.report.saved import line


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line(replace(full(), step=n, run=RunTotals(n))) + "\n" for n in (1, 2, 3)))
    return path


def test_a_saved_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    full().save(tmp_path / "step.json")
    assert show_report(tmp_path / "step.json") == 0
    assert capsys.readouterr().out == f"{full()}\n"


def test_a_file_of_metrics(metrics: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", "--report", str(metrics)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("fit in gpu/0: 3 steps, ")
    assert "the last step:\nstep 3 of fit in gpu/0: " in said


def test_json(metrics: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", "--report", str(metrics), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["programs"][0]["steps"] == 3


def test_what_is_no_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(StateError, match="holds no report"):
        show_report(tmp_path / "file")


def test_a_file_that_is_not_there_is_told_as_a_reports(capsys: pytest.CaptureFixture) -> None:
    assert main(["show", "--report", "nothing.jsonl"]) == 66
    said = capsys.readouterr().err
    assert "there is no file 'nothing.jsonl'" in said
    assert "show --report FILE reads what a run has left" in said


def test_it_loads_no_tensorflow(metrics: Path) -> None:
    code = (
        "import sys; from whale_nebula.cli.main import main; main(sys.argv[1:]);"
        "print(*sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "show", "--report", str(metrics)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, ""), done.stderr
