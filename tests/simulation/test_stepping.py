"""Simulated threads: the clock, locks, conditions, deaths and hangs of a run."""

import random

import pytest

from tests.simulation.stepping import Condition, Gone, Lock, Over, Turns


def turns(seed: int = 1, limit: float = 100.0) -> Turns:
    return Turns(random.Random(seed), limit=limit)


def told(seed: int) -> list[str]:
    """Three threads that sleep and take one lock, and the order in which they say so."""
    run, said = turns(seed), []
    lock = Lock(run)

    def work(name: str) -> None:
        for number in range(4):
            run.sleep(1.0)
            with lock:
                said.append(f"{name}{number} at {run.now():.0f}")

    for name in "abc":
        run.spawn(lambda name=name: work(name), name, awaited=True)
    run.run()
    return said


def test_a_seed_is_an_order_and_another_seed_another() -> None:
    assert told(1) == told(1)
    assert len({tuple(told(seed)) for seed in range(6)}) > 1
    assert sorted(told(1)) == sorted(told(2))


def test_a_condition_wakes_who_waits_or_lets_him_go_in_time() -> None:
    run, found = turns(), {}
    changed = Condition(run)

    def wait(name: str, timeout: float) -> None:
        with changed:
            found[name] = changed.wait(timeout), run.now()

    def tell() -> None:
        run.sleep(2.0)
        with changed:
            changed.notify_all()

    for name, timeout in (("early", 1.0), ("told", 5.0)):
        run.spawn(lambda name=name, timeout=timeout: wait(name, timeout), name, awaited=True)
    run.spawn(tell, "teller", awaited=True)
    run.run()
    assert found == {"early": (False, 1.0), "told": (True, 2.0)}


@pytest.mark.parametrize("endless", [False, True], ids=["deadlock", "for ever"])
def test_what_never_ends_is_a_hang_and_is_unwound(endless: bool) -> None:
    run, unwound = turns(limit=50.0), []

    def work() -> None:
        try:
            while True:
                run.block(run.now() + 1.0 if endless else None)
        except Over:
            unwound.append(True)
            raise

    run.spawn(work, "one", awaited=True)
    run.run()
    assert run.hangs and unwound == [True] and run.broken == []


def test_who_is_killed_holds_nothing_and_comes_no_more() -> None:
    run, said = turns(), []
    lock = Lock(run)

    def victim() -> None:
        with lock:
            run.sleep(1.0)
            run.kill("npu/0")
            run.block()
        said.append("never")

    def other() -> None:
        run.sleep(2.0)
        with lock:
            said.append("free")

    run.spawn(victim, "victim", "npu/0", awaited=True)
    run.spawn(other, "other", "gpu/0", awaited=True)
    run.run()
    assert said == ["free"] and not run.hangs and not run.lives("npu/0")


def test_an_error_that_nobody_expected_is_kept() -> None:
    run = turns()

    def broken() -> None:
        raise KeyError("x")

    def gone() -> None:
        raise Gone

    run.spawn(broken, "broken", awaited=True)
    run.spawn(gone, "gone", awaited=True)
    run.run()
    assert [(name, repr(error)) for name, error in run.broken] == [("broken", "KeyError('x')")]
