"""Workers that are asked to end leave together, between two steps."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL, ExitAgreement, WorkerExit


def test_request_before_the_first_step_exits_at_once() -> None:
    with pytest.raises(WorkerExit, match="before its first step: SIGTERM") as left:
        ExitAgreement().request_exit("SIGTERM")
    assert left.value.code == EXIT_TEMPFAIL


def test_all_workers_leave_after_the_same_step() -> None:
    workers = {name: ExitAgreement() for name in ("gpu/0", "npu/0", "npu/1")}
    taken = dict.fromkeys(workers, 0)
    for step in range(10):
        for name, exit_agreement in workers.items():
            if step == 3:
                with pytest.raises(WorkerExit, match="gpu/0 was asked to stop: SIGTERM"):
                    exit_agreement.begin_step()
                continue
            exit_agreement.begin_step()
            taken[name] += 1
        if step == 3:
            break
        announcements = {name: exit_agreement.exit_reason for name, exit_agreement in workers.items()}
        if step == 1:
            workers["gpu/0"].request_exit("SIGTERM")  # in the middle: what it announced in this step stands
        for exit_agreement in workers.values():
            exit_agreement.conclude_step(announcements)
    assert taken == dict.fromkeys(workers, 3)
    assert all(exit_agreement.is_agreed for exit_agreement in workers.values())


def test_unknown_reason_of_a_peer_is_replaced() -> None:
    exit_agreement = ExitAgreement()
    exit_agreement.conclude_step({"gpu/0": None, "npu/0": "\x1b[2J\nmischief", "npu/1": "SIGINT"})
    with pytest.raises(WorkerExit) as left:
        exit_agreement.begin_step()
    assert str(left.value) == "npu/0 was asked to stop: a signal; npu/1 was asked to stop: SIGINT"


def test_first_reason_to_leave_is_kept() -> None:
    exit_agreement = ExitAgreement()
    exit_agreement.conclude_step({"gpu/0": "SIGTERM"})
    exit_agreement.conclude_step({"npu/0": "SIGINT"})
    with pytest.raises(WorkerExit, match=r"^gpu/0 was asked to stop: SIGTERM$"):
        exit_agreement.begin_step()


FORK_SCRIPT = """
import os, signal, sys, time
from whale_nebula.launch.worker_exit import exit_agreement, set_signal_handler, request_exit_on_signals
if sys.argv[1] == "worker":
    request_exit_on_signals()
else:
    assert [set_signal_handler(signal.SIGTERM, exit_agreement.request_exit) for _ in range(2)] == [True, False]
exit_agreement.begin_step()
child = os.fork()
if not child:
    time.sleep(300)
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "worker":
    os.kill(os.getpid(), signal.SIGINT)
print(exit_agreement.exit_reason, exit_agreement.is_agreed)
"""


@pytest.mark.parametrize("kind", ["worker", "script"])
def test_signal_requests_exit_but_still_kills_forked_processes(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK_SCRIPT, kind], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == [str(-signal.SIGTERM), "SIGTERM False"], done.stderr
