"""Displays of nb.init(show=, metrics=): validated, opened, given every step, closed with the run."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest

import whale_nebula as nb
from tests.unit.report.making import full
from tests.unit.report.terminal import stand_in
from whale_nebula.report.published import is_watched, publish
from whale_nebula.report.watchers import Seen
from whale_nebula.runtime.run import _watch_steps


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
def test_what_cannot_be_meant_is_refused(options: dict, what: str) -> None:
    with pytest.raises(nb.errors.OptionError, match=what) as refused:
        nb.init(**options)
    assert "test_audience.py" in refused.value.where
    assert refused.value.mend
    nb.init()  # nothing was opened


def test_a_file_that_cannot_be_written_opens_no_run(tmp_path: Path) -> None:
    with pytest.raises(nb.errors.ConfigError, match="cannot write the metrics file") as caught:
        nb.init(metrics=tmp_path / "none" / "run.jsonl")
    assert "test_audience.py:" in caught.value.where
    nb.init()


def test_a_run_that_is_not_opened_after_all_leaves_nobody_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, before = stand_in(monkeypatch), threading.active_count()
    with nb.init() as run:
        with pytest.raises(TypeError), _watch_steps(run, Seen("live", {"metrics": tmp_path / "run.jsonl"})):
            assert sys.stdout is not seen
            raise TypeError("nobody joins")
        assert (sys.stdout, is_watched(), threading.active_count()) == (seen, False, before)


def test_without_a_word_nobody_watches() -> None:
    nb.init()
    assert not is_watched()


def test_the_config_says_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with nb.init({"metrics": str(tmp_path / "run.jsonl"), "show": "lines"}):
        publish(full())
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1
    assert [record.name for record in caplog.records] == ["whale_nebula.steps"]
    with pytest.raises(nb.errors.ConfigError, match="'life' is not a valid value"):
        nb.init({"show": "life"})


def test_live_without_a_terminal_is_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), nb.init(show="live"):
        publish(full())
    assert len(caplog.records) == 1
