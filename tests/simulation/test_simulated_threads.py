"""Simulated threads: the clock, locks, conditions, deaths and hangs of a run."""

import random

import pytest

from tests.simulation.simulated_threads import Condition, Lock, Scheduler, SimulationEnded, WorkerKilled


def make_scheduler(seed: int = 1, limit: float = 100.0) -> Scheduler:
    return Scheduler(random.Random(seed), limit=limit)


def record_order(seed: int) -> list[str]:
    """Three threads that sleep and take one lock, and the order in which they say so."""
    run, records = make_scheduler(seed), []
    lock = Lock(run)

    def work(name: str) -> None:
        for number in range(4):
            run.sleep(1.0)
            with lock:
                records.append(f"{name}{number} at {run.now():.0f}")

    for name in "abc":
        run.spawn(lambda name=name: work(name), name, awaited=True)
    run.run()
    return records


def test_seed_determines_the_order_of_threads() -> None:
    assert record_order(1) == record_order(1)
    assert len({tuple(record_order(seed)) for seed in range(6)}) > 1
    assert sorted(record_order(1)) == sorted(record_order(2))


def test_condition_wait_ends_by_notification_or_timeout() -> None:
    run, results = make_scheduler(), {}
    changed = Condition(run)

    def wait(name: str, timeout: float) -> None:
        with changed:
            results[name] = changed.wait(timeout), run.now()

    def notify() -> None:
        run.sleep(2.0)
        with changed:
            changed.notify_all()

    for name, timeout in (("early", 1.0), ("notified", 5.0)):
        run.spawn(lambda name=name, timeout=timeout: wait(name, timeout), name, awaited=True)
    run.spawn(notify, "notifier", awaited=True)
    run.run()
    assert results == {"early": (False, 1.0), "notified": (True, 2.0)}


@pytest.mark.parametrize("endless", [False, True], ids=["deadlock", "for ever"])
def test_endless_thread_is_a_hang_and_is_unwound(endless: bool) -> None:
    run, unwound = make_scheduler(limit=50.0), []

    def work() -> None:
        try:
            while True:
                run.block(run.now() + 1.0 if endless else None)
        except SimulationEnded:
            unwound.append(True)
            raise

    run.spawn(work, "one", awaited=True)
    run.run()
    assert run.is_hanging and unwound == [True] and run.unexpected_errors == []


def test_killed_worker_releases_its_locks_and_stops() -> None:
    run, records = make_scheduler(), []
    lock = Lock(run)

    def victim() -> None:
        with lock:
            run.sleep(1.0)
            run.kill("npu/0")
            run.block()
        records.append("never")

    def other() -> None:
        run.sleep(2.0)
        with lock:
            records.append("free")

    run.spawn(victim, "victim", "npu/0", awaited=True)
    run.spawn(other, "other", "gpu/0", awaited=True)
    run.run()
    assert records == ["free"] and not run.is_hanging and not run.is_alive("npu/0")


def test_unexpected_error_is_recorded() -> None:
    run = make_scheduler()

    def unexpected_errors() -> None:
        raise KeyError("x")

    def killed() -> None:
        raise WorkerKilled

    run.spawn(unexpected_errors, "broken", awaited=True)
    run.spawn(killed, "gone", awaited=True)
    run.run()
    assert [(name, repr(error)) for name, error in run.unexpected_errors] == [("broken", "KeyError('x')")]
