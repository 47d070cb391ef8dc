"""A process ends during training: if it was killed, the others end with its name; if it was asked to, all leave
together.
"""

from __future__ import annotations

import signal
import time

import psutil

from tests.processes.worker_runs import start_training, wait_for_run
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL

GRACE = 30.0


def test_kill_ends_other_workers_with_its_name() -> None:
    with start_training(3, "train_endlessly", steps=3) as job:
        job.signal("c1/0", signal.SIGKILL)
        start = time.monotonic()
        found = wait_for_run(job, GRACE)
        assert time.monotonic() - start < GRACE
        assert not any(psutil.pid_exists(pid) for pid in job.pids.values())
    assert found.result.culprit == "c1/0"
    assert found.result.codes == {"c0/0": 1, "c1/0": -signal.SIGKILL, "c2/0": 1}
    for worker in ("c0/0", "c2/0"):
        assert "worker 'c1/0' is gone" in found.reports[worker]["error"]


def test_sigterm_ends_all_workers_after_the_same_step() -> None:
    with start_training(2, "train_endlessly", steps=3) as job:
        job.signal("c1/0", signal.SIGTERM)
        found = wait_for_run(job)
    assert found.result.codes == {"c0/0": EXIT_TEMPFAIL, "c1/0": EXIT_TEMPFAIL}
    assert found.get_common("steps") >= 3
    for worker, outcome in found.result.outcomes.items():
        assert f"whale-nebula: worker {worker} leaves: c1/0 was asked to stop: SIGTERM" in outcome.err
