"""What a worker starts ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from whale_nebula.launch import job

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(300)
"""
LEADER = f"""
import subprocess, sys
subprocess.Popen(["sleep", "300"])
stubborn = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
stubborn.stdout.readline()
"""


def test_the_rest_of_a_group_is_ended_while_its_dead_leader_holds_the_number() -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER], process_group=0)
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    assert len(job.members(leader.pid)) == 2
    job.end_group(leader.pid, linger=0.1)
    assert leader.wait(60) == 0
    assert gone(leader.pid)


def test_an_empty_group_is_ended_at_once() -> None:
    leader = subprocess.Popen(["true"], process_group=0)
    leader.wait(60)
    job.end_group(leader.pid)
    job.signal_group(leader.pid, signal.SIGTERM)
    assert job.members(leader.pid) == []


def gone(number: int) -> bool:
    for _ in range(3000):
        if not job.members(number):
            return True
        os.sched_yield()
    return False
