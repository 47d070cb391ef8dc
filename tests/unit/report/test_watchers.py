"""Watchers receive every step, in order, in a separate thread; one appends a line of JSON to a file."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.sample_reports import make_full_report
from whale_nebula.report.published import begin, find_running_step, is_watched, last_report, publish, watch
from whale_nebula.report.report import Report, read
from whale_nebula.report.watchers import MetricsFile, WatcherThread


class RecordingWatcher:
    """Keeps what it is told; fails at the step that it is given."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.events: list[object] = []
        self.ticked = threading.Event()
        self.fails_at = fails_at

    def step(self, report: Report) -> None:
        if report.step == self.fails_at:
            raise OSError("no space left on device")
        self.events.append((report.step, threading.current_thread().name))

    def tick(self) -> None:
        self.ticked.set()

    def close(self) -> None:
        self.events.append("closed")

    def __str__(self) -> str:
        return "the notes"


def test_watchers_receive_all_steps_in_order() -> None:
    several = [RecordingWatcher(), RecordingWatcher()]
    watching = WatcherThread(several)
    watch([watching])
    for step in range(1, 600):  # more than may wait
        publish(replace(make_full_report(), step=step))
    watching.close()
    for notes in several:
        assert notes.events == [*((step, "nebula-report") for step in range(1, 600)), "closed"]


def test_watchers_tick_between_steps() -> None:
    notes = RecordingWatcher()
    watching = WatcherThread([notes])
    assert notes.ticked.wait(10.0)
    watching.close()


def test_failing_watcher_is_logged_and_others_continue(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = RecordingWatcher(fails_at=2), RecordingWatcher()
    watching = WatcherThread([broken, sound])
    with caplog.at_level(logging.WARNING, "whale_nebula"):
        for step in (1, 2, 3):
            watching.publish(replace(make_full_report(), step=step))
        watching.close()
    assert [events[0] for events in broken.events] == [1]
    assert [events[0] for events in sound.events[:-1]] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "the notes receives no more steps: no space left on device"
    ]


class Step:
    name, steps, doing = "fit", 2, {"gpu": "forward 1"}


def test_step_is_running_until_it_is_reported() -> None:
    begin(Step())
    assert (find_running_step(), is_watched()) == (None, False)  # nobody looks
    watching = WatcherThread([])
    watch([watching])
    begin(Step())
    assert find_running_step().doing == {"gpu": "forward 1"}
    publish(make_full_report())
    assert find_running_step() is None
    assert last_report().step == 3
    watching.close()


def test_metrics_file_is_flushed_after_each_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run.jsonl")
    for step in (1, 2):
        file.step(replace(make_full_report(), step=step))
        lines = (tmp_path / "run.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    file.close()


def test_two_metrics_writers_append_to_one_file(tmp_path: Path) -> None:
    files = [MetricsFile(tmp_path / "run.jsonl") for _ in range(2)]
    for step in (1, 2):
        for number, file in enumerate(files):
            file.step(replace(make_full_report(), step=step, worker=f"c{number}/0"))
    for file in files:
        file.close()
    found = [(report.worker, report.step) for report in read(tmp_path / "run.jsonl")[0]]
    assert found == [("c0/0", 1), ("c1/0", 1), ("c0/0", 2), ("c1/0", 2)]


def test_truncated_last_line_of_a_metrics_file_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"format": "whale_neb')
    file = MetricsFile(path)
    file.step(make_full_report())
    file.close()
    assert read(path) == ([Report.load(path)], 1)
    MetricsFile(path).close()
    assert path.read_text().count("\n") == 2  # nothing to end this time
