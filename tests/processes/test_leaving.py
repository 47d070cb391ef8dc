"""One process is asked to end in the middle of training: all leave, after the same step."""

from __future__ import annotations

import signal
import threading

from tests.processes.running import DEADLINE, ended, started
from whale_nebula.launch.leaving import EXIT_LEFT


def test_all_leave_after_the_same_step() -> None:
    training, heard = threading.Event(), set()

    def echo(worker: str, stream: str, line: str) -> None:
        if '"steps", 3' in line:
            heard.add(worker)
            if len(heard) == 2:
                training.set()

    with started("leaving", 2, echo=echo) as job:
        assert training.wait(DEADLINE)
        job.signal("c1/0", signal.SIGTERM)
        found = ended(job)
    assert found.result.codes == {"c0/0": EXIT_LEFT, "c1/0": EXIT_LEFT}
    assert found.same("steps") >= 3
    for worker, outcome in found.result.outcomes.items():
        assert f"whale-nebula: worker {worker} leaves: c1/0 was asked to end: SIGTERM" in outcome.err
