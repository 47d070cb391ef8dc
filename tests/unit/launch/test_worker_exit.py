"""Workers that are asked to end leave together, between two steps."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from whale_nebula.launch.worker_exit import EXIT_LEFT, Departure, Leaving


def test_request_before_the_first_step_exits_at_once() -> None:
    with pytest.raises(Leaving, match="before its first step: SIGTERM") as left:
        Departure().ask("SIGTERM")
    assert left.value.code == EXIT_LEFT


def test_all_workers_leave_after_the_same_step() -> None:
    workers = {name: Departure() for name in ("gpu/0", "npu/0", "npu/1")}
    taken = dict.fromkeys(workers, 0)
    for step in range(10):
        for name, departure in workers.items():
            if step == 3:
                with pytest.raises(Leaving, match="gpu/0 was asked to stop: SIGTERM"):
                    departure.begin()
                continue
            departure.begin()
            taken[name] += 1
        if step == 3:
            break
        said = {name: departure.asked for name, departure in workers.items()}
        if step == 1:
            workers["gpu/0"].ask("SIGTERM")  # in the middle: what it said of this step stands
        for departure in workers.values():
            departure.settle(said)
    assert taken == dict.fromkeys(workers, 3)
    assert all(departure.agreed for departure in workers.values())


def test_unknown_reason_of_a_peer_is_replaced() -> None:
    departure = Departure()
    departure.settle({"gpu/0": None, "npu/0": "\x1b[2J\nmischief", "npu/1": "SIGINT"})
    with pytest.raises(Leaving) as left:
        departure.begin()
    assert str(left.value) == "npu/0 was asked to stop: a signal; npu/1 was asked to stop: SIGINT"


def test_first_reason_to_leave_is_kept() -> None:
    departure = Departure()
    departure.settle({"gpu/0": "SIGTERM"})
    departure.settle({"npu/0": "SIGINT"})
    with pytest.raises(Leaving, match=r"^gpu/0 was asked to stop: SIGTERM$"):
        departure.begin()


FORK_SCRIPT = """
import os, signal, sys, time
from whale_nebula.launch.worker_exit import departure, heed_signal, leave_on_signals
if sys.argv[1] == "worker":
    leave_on_signals()
else:
    assert heed_signal(signal.SIGTERM, departure.ask) and not heed_signal(signal.SIGTERM, departure.ask)
departure.begin()
child = os.fork()
if not child:
    time.sleep(300)
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "worker":
    os.kill(os.getpid(), signal.SIGINT)
print(departure.asked, departure.agreed)
"""


@pytest.mark.parametrize("kind", ["worker", "script"])
def test_signal_requests_exit_but_still_kills_forked_processes(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK_SCRIPT, kind], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == [str(-signal.SIGTERM), "SIGTERM False"], done.stderr
