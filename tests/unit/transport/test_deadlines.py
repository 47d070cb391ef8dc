"""Deadlines, errors of waits, observed rates of a line, and the clock."""

from __future__ import annotations

import threading

import pytest

from whale_nebula.transport.deadlines import Deadlines, Meter, MonotonicClock, Wait, WaitAnnouncer


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_wait_is_announced_at_start_every_ten_seconds_and_at_end() -> None:
    waits: list[Wait] = []
    now = FakeTime()
    waiting = WaitAnnouncer("worker 'npu/0'", "10.0.0.2:7101", waits.append, now=now)
    for second in range(26):
        now.seconds = second
        waiting.announce("it is silent", limit=120.0)
    waiting.finish()
    waiting.finish()
    assert [(wait.seconds, wait.over) for wait in waits] == [(0, False), (10, False), (20, False), (25, True)]


def test_new_reason_of_a_wait_is_announced_at_once() -> None:
    waits: list[Wait] = []
    now = FakeTime()
    waiting = WaitAnnouncer("worker 'npu/0'", "", waits.append, now=now)
    waiting.announce("not up yet", limit=60.0, since=-5.0)
    now.seconds = 1.0
    waiting.announce("it is silent", limit=60.0)
    assert [(wait.reason, wait.seconds) for wait in waits] == [("not up yet", 5.0), ("it is silent", 6.0)]


def test_dropped_wait_announces_no_success() -> None:
    waits: list[Wait] = []
    waiting = WaitAnnouncer("gateway 'npu/gateway'", "", waits.append)
    waiting.announce("it is not up yet")
    waiting.abandon()
    waiting.finish()
    assert [str(wait) for wait in waits] == ["waiting for gateway 'npu/gateway', 0 s: it is not up yet"]


def test_deadlines_depend_on_silence_and_rate() -> None:
    deadlines = Deadlines(silence=8.0, patience=20.0)
    assert deadlines.keepalive + deadlines.find_ping_timeout(None) < 8.0
    assert deadlines.find_ping_timeout(7_500_000) == deadlines.find_ping_timeout(None)
    assert deadlines.find_ping_timeout(750_000) > 5.6  # 4 MiB in a kernel's buffer at 6 Mbit/s
    assert deadlines.find_stall_timeout(64 << 20, 7_500_000) == 20.0
    assert deadlines.find_stall_timeout(64 << 20, 750_000) > 64 * (1 << 20) / 750_000


def test_retry_pause_grows_with_attempts_and_jitter() -> None:
    deadlines = Deadlines()
    assert deadlines.draw_retry_pause(3, 0.0) < deadlines.draw_retry_pause(3, 0.9) < deadlines.draw_retry_pause(4, 0.9)
    assert deadlines.draw_retry_pause(10_000, 0.99) <= 3.0


def test_meter_ignores_idle_time() -> None:
    meter = Meter()
    meter.start(0.0)
    meter.count_arrived(1000, 2.0, more=False)
    assert meter.rate == 500.0
    meter.count_arrived(10**9, 50.0, more=True)  # nothing was on its way
    meter.start(100.0)
    meter.stop()
    meter.start(200.0)
    meter.count_arrived(1000, 202.0, more=False)
    assert meter.rate == 500.0


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.003])
def test_clock_waits_end_on_time(seconds: float) -> None:
    clock, condition = MonotonicClock(), threading.Condition()
    end = clock.now() + seconds
    with condition:
        while (left := end - clock.now()) > 0:
            clock.wait(condition, left)
    assert clock.now() >= end


def test_notification_ends_an_infinite_wait() -> None:
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
