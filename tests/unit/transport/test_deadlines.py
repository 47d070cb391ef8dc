"""Deadlines, errors of waits, observed rates of a line, and the clock."""

from __future__ import annotations

import threading

import pytest

from whale_nebula.transport.deadlines import Deadlines, Meter, MonotonicClock, Wait, Waiting


class Time:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_wait_is_said_at_once_every_ten_seconds_and_at_its_end() -> None:
    said: list[Wait] = []
    now = Time()
    waiting = Waiting("worker 'npu/0'", "10.0.0.2:7101", said.append, now=now)
    for second in range(26):
        now.seconds = second
        waiting.on("it is silent", limit=120.0)
    waiting.off()
    waiting.off()
    assert [(wait.seconds, wait.over) for wait in said] == [(0, False), (10, False), (20, False), (25, True)]


def test_another_reason_is_said_at_once_and_the_wait_is_the_same() -> None:
    said: list[Wait] = []
    now = Time()
    waiting = Waiting("worker 'npu/0'", "", said.append, now=now)
    waiting.on("not up yet", limit=60.0, since=-5.0)
    now.seconds = 1.0
    waiting.on("it is silent", limit=60.0)
    assert [(wait.why, wait.seconds) for wait in said] == [("not up yet", 5.0), ("it is silent", 6.0)]


def test_what_is_waited_for_no_more_is_not_said_to_be_there() -> None:
    said: list[Wait] = []
    waiting = Waiting("gateway 'npu/gateway'", "", said.append)
    waiting.on("it is not up yet")
    waiting.drop()
    waiting.off()
    assert [str(wait) for wait in said] == ["waiting for gateway 'npu/gateway', 0 s: it is not up yet"]


def test_deadlines_follow_from_silence_and_from_the_rate() -> None:
    deadlines = Deadlines(silence=8.0, patience=20.0)
    assert deadlines.keepalive + deadlines.ping(None) < 8.0
    assert deadlines.ping(7_500_000) == deadlines.ping(None)
    assert deadlines.ping(750_000) > 5.6  # 4 MiB in a kernel's buffer at 6 Mbit/s
    assert deadlines.stall(64 << 20, 7_500_000) == 20.0
    assert deadlines.stall(64 << 20, 750_000) > 64 * (1 << 20) / 750_000


def test_trying_again_takes_longer_each_time_and_never_the_same() -> None:
    deadlines = Deadlines()
    assert deadlines.retry_pause(3, 0.0) < deadlines.retry_pause(3, 0.9) < deadlines.retry_pause(4, 0.9)
    assert deadlines.retry_pause(10_000, 0.99) <= 3.0


def test_idle_time_does_not_count_as_slow() -> None:
    meter = Meter()
    meter.busy(0.0)
    meter.note_carried(1000, 2.0, more=False)
    assert meter.rate == 500.0
    meter.note_carried(10**9, 50.0, more=True)  # nothing was on its way
    meter.busy(100.0)
    meter.idle()
    meter.busy(200.0)
    meter.note_carried(1000, 202.0, more=False)
    assert meter.rate == 500.0


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.003])
def test_waiting_again_and_again_ends_on_time_and_never_before(seconds: float) -> None:
    clock, condition = MonotonicClock(), threading.Condition()
    end = clock.now() + seconds
    with condition:
        while (left := end - clock.now()) > 0:
            clock.wait(condition, left)
    assert clock.now() >= end


def test_a_notice_ends_a_wait_that_would_last_for_ever() -> None:
    clock, condition = MonotonicClock(), threading.Condition()
    woken = threading.Event()

    def wait() -> None:
        with condition:
            ready.set()
            clock.wait(condition, float("inf"))
        woken.set()

    ready = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    assert ready.wait(20.0)
    with condition:
        condition.notify_all()
    thread.join(20.0)
    assert woken.is_set()
