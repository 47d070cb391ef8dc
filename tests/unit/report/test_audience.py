"""Displays of nb.init(show=, metrics=): validated, opened, given every step, closed with the run."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest

import whale_nebula as nb
from tests.unit.report.sample_reports import make_full_report
from tests.unit.report.terminal import replace_standard_streams
from whale_nebula.report.published import is_watched, publish


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"show": "life"}, "show='life' is not a valid value"),
        ({"show": 3}, "show=3 is not a valid value"),
        ({"metrics": 3}, "metrics=3 is not a path"),
        ({"metrics": ""}, "metrics='' is not a path"),
        ({"tensorboard": True}, "tensorboard=True is not a path"),
    ],
)
def test_invalid_output_option_is_refused(options: dict, what: str) -> None:
    with pytest.raises(nb.errors.OptionError, match=what) as refused:
        nb.init(**options)
    assert "test_audience.py" in refused.value.where
    assert refused.value.mend
    nb.init()  # nothing was opened


def test_unwritable_metrics_file_is_refused_before_the_run_opens(tmp_path: Path) -> None:
    with pytest.raises(nb.errors.ConfigError, match="cannot write the metrics file") as caught:
        nb.init(metrics=tmp_path / "none" / "run.jsonl")
    assert "test_audience.py:" in caught.value.where
    nb.init()


def test_failed_start_removes_all_watchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, before = replace_standard_streams(monkeypatch), threading.active_count()
    (tmp_path / "file").touch()
    with pytest.raises((nb.errors.NebulaError, OSError)):
        nb.init(show="live", metrics=tmp_path / "run.jsonl", checkpoint=tmp_path / "file" / "folder")
    assert (tmp_path / "run.jsonl").exists()  # it was opened
    assert (sys.stdout, is_watched(), threading.active_count()) == (terminal, False, before)
    nb.init()


def test_default_run_has_no_watchers() -> None:
    nb.init()
    assert not is_watched()


def test_config_can_set_metrics_and_show(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with nb.init({"metrics": str(tmp_path / "run.jsonl"), "show": "lines"}):
        publish(make_full_report())
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1
    assert [record.name for record in caplog.records] == ["whale_nebula.steps"]
    with pytest.raises(nb.errors.ConfigError, match="'life' is not a valid value"):
        nb.init({"show": "life"})


def test_live_display_without_a_terminal_logs_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), nb.init(show="live"):
        publish(make_full_report())
    assert len(caplog.records) == 1
