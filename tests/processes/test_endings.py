"""A process ends during training: if it was killed, the others end with its name; if it was asked to, all leave
together.
"""

from __future__ import annotations

import signal
import time

import psutil

from tests.processes.running import ended, training
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL

GRACE = 30.0


def test_when_one_is_killed_the_others_end_with_its_name() -> None:
    with training(3, "endless", steps=3) as job:
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
    with training(2, "endless", steps=3) as job:
        job.signal("c1/0", signal.SIGTERM)
        found = ended(job)
    assert found.result.codes == {"c0/0": EXIT_TEMPFAIL, "c1/0": EXIT_TEMPFAIL}
    assert found.same("steps") >= 3
    for worker, outcome in found.result.outcomes.items():
        assert f"whale-nebula: worker {worker} leaves: c1/0 was asked to stop: SIGTERM" in outcome.err
