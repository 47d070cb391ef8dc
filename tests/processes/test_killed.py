"""A process is killed in the middle of training: the others end, soon, with its name, and nothing is left."""

from __future__ import annotations

import signal
import threading
import time

import psutil

from tests.processes.running import DEADLINE, ended, started

GRACE = 30.0


def test_the_others_end_with_its_name() -> None:
    trained, workers = threading.Event(), set()

    def heard(worker: str, stream: str, line: str) -> None:
        if '"training"' in line:
            workers.add(worker)
            if len(workers) == 3:
                trained.set()

    with started("endless", 3, echo=heard) as job:
        limit = time.monotonic() + DEADLINE
        while not trained.wait(0.2):
            assert time.monotonic() < limit
            assert all(map(psutil.pid_exists, job.pids.values())), ended(job, GRACE)
        job.signal("c1/0", signal.SIGKILL)
        start = time.monotonic()
        found = ended(job, GRACE)
        assert time.monotonic() - start < GRACE
        assert not any(psutil.pid_exists(pid) for pid in job.pids.values())
    assert found.result.culprit == "c1/0"
    assert found.result.codes == {"c0/0": 1, "c1/0": -signal.SIGKILL, "c2/0": 1}
    for worker in ("c0/0", "c2/0"):
        assert "worker 'c1/0' is gone" in found.told[worker]["error"]
