"""Keeping to a rate: long runs, idle lines, small frames, many threads."""

from __future__ import annotations

import threading

from whale_nebula.gateway.pacer import SMALL_BYTES, Pacer

MIB = 1 << 20
RATE = 7.5e6


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def paced(rate: float | None = RATE) -> tuple[Pacer, Clock]:
    clock = Clock()
    return Pacer(rate, now=lambda: clock.now, sleep=clock.sleep), clock


def test_a_long_run_keeps_to_the_rate_with_what_the_layers_below_add() -> None:
    pacer, clock = paced()
    for _ in range(100):
        pacer.take(MIB)
    assert 0.99 < clock.now / (99 * 1.04 * MIB / RATE) < 1.01


def test_at_least_95_percent_of_the_line_are_used() -> None:
    pacer, clock = paced()
    for _ in range(100):
        pacer.take(MIB)
    assert 100 * MIB / clock.now > 0.95 * RATE


def test_nobody_waits_on_an_idle_line() -> None:
    pacer, clock = paced()
    pacer.take(MIB)
    assert clock.now == 0.0
    clock.now = 10.0
    pacer.take(MIB)
    assert clock.now == 10.0


def test_time_in_which_nothing_was_sent_is_not_saved_up() -> None:
    pacer, clock = paced()
    clock.now = 1000.0
    for _ in range(11):
        pacer.take(MIB)
    assert clock.now - 1000.0 > 9.9 * MIB / RATE


def test_what_is_small_never_waits_and_is_counted() -> None:
    pacer, clock = paced()
    for _ in range(1000):
        pacer.take(SMALL_BYTES - 1)
    assert clock.now == 0.0
    pacer.take(SMALL_BYTES)
    assert clock.now > 999 * SMALL_BYTES / RATE


def test_without_a_rate_there_is_nothing_to_keep_to() -> None:
    pacer, clock = paced(None)
    pacer.take(1 << 40)
    assert clock.now == 0.0


def test_threads_share_one_line() -> None:
    waits: list[float] = []
    pacer = Pacer(RATE, now=lambda: 0.0, sleep=waits.append)
    threads = [threading.Thread(target=lambda: [pacer.take(MIB) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    turn = 1.04 * MIB / RATE
    assert len(waits) == 199  # the first did not wait
    assert all(abs(wait + 0.02 - turn * place) < 1e-6 for place, wait in enumerate(sorted(waits), start=1))
