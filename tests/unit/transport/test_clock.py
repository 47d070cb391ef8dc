"""The clock of this machine: it wakes early rather than late, and never sleeps through a notice."""

import threading

import pytest

from whale_nebula.transport.deadlines import MonotonicClock


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
