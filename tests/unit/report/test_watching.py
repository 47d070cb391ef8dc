"""Watchers receive every step, in order, in a separate thread."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from tests.unit.report.making import full
from whale_nebula.report.published import begin, find_running_step, is_watched, last_report, publish, watch
from whale_nebula.report.report import Report
from whale_nebula.report.watchers import Watching


class Notes:
    """Keeps what it is told; fails at the step that it is given."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[object] = []
        self.ticked = threading.Event()
        self.fails_at = fails_at

    def step(self, report: Report) -> None:
        if report.step == self.fails_at:
            raise OSError("no space left on device")
        self.told.append((report.step, threading.current_thread().name))

    def tick(self) -> None:
        self.ticked.set()

    def close(self) -> None:
        self.told.append("closed")

    def __str__(self) -> str:
        return "the notes"


def test_all_are_told_in_order_before_the_end() -> None:
    several = [Notes(), Notes()]
    watching = Watching(several)
    watch([watching])
    for step in range(1, 600):  # more than may wait
        publish(replace(full(), step=step))
    watching.close()
    for notes in several:
        assert notes.told == [*((step, "nebula-report") for step in range(1, 600)), "closed"]


def test_time_goes_on_between_steps() -> None:
    notes = Notes()
    watching = Watching([notes])
    assert notes.ticked.wait(10.0)
    watching.close()


def test_who_fails_is_named_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Notes(fails_at=2), Notes()
    watching = Watching([broken, sound])
    with caplog.at_level(logging.WARNING, "whale_nebula"):
        for step in (1, 2, 3):
            watching.tell(replace(full(), step=step))
        watching.close()
    assert [told[0] for told in broken.told] == [1]
    assert [told[0] for told in sound.told[:-1]] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "the notes is not told of steps any more: no space left on device"
    ]


class Step:
    name, steps, doing = "fit", 2, {"gpu": "forward 1"}


def test_a_step_is_under_way_until_it_is_reported() -> None:
    begin(Step())
    assert (find_running_step(), is_watched()) == (None, False)  # nobody looks
    watching = Watching([])
    watch([watching])
    begin(Step())
    assert find_running_step().doing == {"gpu": "forward 1"}
    publish(full())
    assert find_running_step() is None
    assert last_report().step == 3
    watching.close()
