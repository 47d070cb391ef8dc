"""A process ends in the middle of training: killed, the others end with its name; asked to, all leave together."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import psutil

from tests.processes.running import DEADLINE, ended, started
from whale_nebula.launch import Job
from whale_nebula.launch.ending import EXIT_LEFT

GRACE = 30.0


@contextlib.contextmanager
def training(workers: int) -> Iterator[Job]:
    """A run in which all are in the middle of training."""
    trained, heard = threading.Event(), set()

    def echo(worker: str, stream: str, line: str) -> None:
        if '"steps", 3' in line:
            heard.add(worker)
            if len(heard) == workers:
                trained.set()

    with started("train", workers, "endless", echo=echo) as job:
        limit = time.monotonic() + DEADLINE
        while not trained.wait(0.2):
            assert time.monotonic() < limit
            assert all(map(psutil.pid_exists, job.pids.values())), ended(job, GRACE)
        yield job


def test_when_one_is_killed_the_others_end_with_its_name() -> None:
    with training(3) as job:
        job.signal("c1/0", signal.SIGKILL)
        start = time.monotonic()
        found = ended(job, GRACE)
        assert time.monotonic() - start < GRACE
        assert not any(psutil.pid_exists(pid) for pid in job.pids.values())
    assert found.result.culprit == "c1/0"
    assert found.result.codes == {"c0/0": 1, "c1/0": -signal.SIGKILL, "c2/0": 1}
    for worker in ("c0/0", "c2/0"):
        assert "worker 'c1/0' is gone" in found.told[worker]["error"]


def test_when_one_is_asked_to_end_all_leave_after_the_same_step() -> None:
    with training(2) as job:
        job.signal("c1/0", signal.SIGTERM)
        found = ended(job)
    assert found.result.codes == {"c0/0": EXIT_LEFT, "c1/0": EXIT_LEFT}
    assert found.same("steps") >= 3
    for worker, outcome in found.result.outcomes.items():
        assert f"whale-nebula: worker {worker} leaves: c1/0 was asked to end: SIGTERM" in outcome.err
