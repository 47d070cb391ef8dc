"""Jobs of real processes: who they are, that they can talk, and how they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from whale_nebula.errors import ConfigError, DeadlineError, RemoteFailureError
from whale_nebula.launch import Result, spawn

SOON = 60.0
TWO = {"gpu/0": "gpu", "npu/0": "npu"}
THREE = {**TWO, "npu/1": "npu"}

START = """
import sys, time
from whale_nebula.launch import attach
me = attach()
"""


def run(code: str, workers: dict[str, str] = TWO, deadline: float = SOON, **options: object) -> Result:
    with spawn(["-c", START + code], workers, **options) as job:
        return job.wait(deadline)


def test_every_worker_is_told_who_it_is() -> None:
    code = "print(me.worker, me.cluster, sorted(me.peers.items()), me.run_id, me.seed, attach() is me)"
    result = run(code, THREE, run_id="r7", seed=11).check()
    assert {name: outcome.out for name, outcome in result.outcomes.items()} == {
        "gpu/0": "gpu/0 gpu [('npu/0', 'npu'), ('npu/1', 'npu')] r7 11 True\n",
        "npu/0": "npu/0 npu [('gpu/0', 'gpu'), ('npu/1', 'npu')] r7 11 True\n",
        "npu/1": "npu/1 npu [('gpu/0', 'gpu'), ('npu/0', 'npu')] r7 11 True\n",
    }


def test_a_killed_worker_is_named_and_the_others_may_report() -> None:
    code = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
time.sleep(300)
"""
    ready: list[str] = []
    with spawn(["-c", START + code], TWO, echo=lambda worker, stream, line: ready.append(line)) as job:
        wait_for(lambda: ready.count("ready\n") == 2)
        start = time.monotonic()
        job.signal("npu/0", signal.SIGKILL)
        result = job.wait(SOON)
    assert time.monotonic() - start < SOON / 2
    assert result.codes == {"gpu/0": 3, "npu/0": -signal.SIGKILL}
    assert (result.culprit, result.late) == ("npu/0", False)
    assert result.outcomes["gpu/0"].out == "ready\n"
    with pytest.raises(RemoteFailureError, match="worker 'npu/0' ended with exit code -9"):
        result.check()


def test_one_failure_ends_all_after_the_grace_even_who_ignores_it(tmp_path: Path) -> None:
    code = f"""
import os
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
if me.cluster == "npu":
    while not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.01)
    sys.exit("something broke")
time.sleep(300)
"""
    ready: list[str] = []
    with spawn(["-c", START + code], TWO, echo=lambda worker, stream, line: ready.append(line)) as job:
        wait_for(lambda: ready.count("ready\n") == 2)
        (tmp_path / "go").touch()
        result = job.wait(SOON, grace=0.2)
    assert result.codes == {"gpu/0": -signal.SIGKILL, "npu/0": 1}
    assert result.culprit == "npu/0"
    with pytest.raises(RemoteFailureError, match="something broke"):
        result.check()


def test_at_the_deadline_all_are_killed() -> None:
    start = time.monotonic()
    result = run("time.sleep(300)", deadline=0.5)
    assert time.monotonic() - start < SOON / 2
    assert result.codes == {"gpu/0": -signal.SIGKILL, "npu/0": -signal.SIGKILL}
    assert (result.culprit, result.late) == (None, True)
    with pytest.raises(DeadlineError, match="gpu/0, npu/0"):
        result.check()


def test_what_workers_started_is_killed_with_them() -> None:
    code = """
import subprocess, time
print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
time.sleep(300)
"""
    lines: list[str] = []
    with spawn(["-c", code], {"gpu/0": "gpu"}, echo=lambda *told: lines.append(told[2])):
        wait_for(lambda: lines)
    wait_for(lambda: not alive(int(lines[0])))


def test_no_worker_outlives_its_launcher() -> None:
    launcher = f"""
import time
from whale_nebula.launch import spawn
code = {START!r} + "print('ready', flush=True); time.sleep(300)"
with spawn(["-c", code], {TWO!r}, echo=lambda *told: print(*job.pids.values(), flush=True)) as job:
    time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.stdout.readline()
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait(SOON)
    process.stdout.close()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert len(pids) == 2


def test_what_a_worker_starts_in_a_session_of_its_own_does_not_outlive_the_launcher() -> None:
    started = "subprocess.Popen(['sleep', '300'], start_new_session=True).pid"
    child = f"import subprocess, time; print({started}, flush=True); time.sleep(300)"
    code = f"""
import subprocess, sys, time
{START}
one = {started}
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(one, child.pid, int(child.stdout.readline()), flush=True)
time.sleep(300)
"""
    launcher = f"""
import time
from whale_nebula.launch import spawn
with spawn(["-c", {code!r}], {{"gpu/0": "gpu"}}, echo=lambda *told: print(told[2], flush=True)):
    time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    process.kill()
    process.wait(SOON)
    process.stdout.close()
    try:
        wait_for(lambda: not any(alive(pid) for pid in pids))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_output_is_kept_apart_and_echoed_by_line() -> None:
    code = "print('out', flush=True); print('err', file=sys.stderr); print('no newline', end='')"
    told: list[tuple[str, str, str]] = []
    result = run(code, {"gpu/0": "gpu"}, echo=lambda *each: told.append(each)).check()
    assert (result.outcomes["gpu/0"].out, result.outcomes["gpu/0"].err) == ("out\nno newline", "err\n")
    assert sorted(told) == [
        ("gpu/0", "err", "err\n"),
        ("gpu/0", "out", "no newline"),
        ("gpu/0", "out", "out\n"),
    ]


def test_the_environment_is_the_childs_alone() -> None:
    before = dict(os.environ)
    result = run("import os; print(os.environ['EXTRA'])", {"gpu/0": "gpu"}, env={"EXTRA": "7"}).check()
    assert result.outcomes["gpu/0"].out == "7\n"
    assert dict(os.environ) == before


def test_a_job_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one worker"), spawn(["-c", ""], {}):
        pass


def test_a_job_that_cannot_start_leaves_nothing_open() -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError), spawn(["-c", ""], TWO, cwd="/nowhere/at/all"):
        pass
    assert psutil.Process().num_fds() == before


def test_a_job_that_ended_leaves_nothing_open() -> None:
    run("pass").check()
    before = psutil.Process().num_fds()
    run("pass").check()
    assert psutil.Process().num_fds() == before


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    """Until the condition holds; the deadline is there only so that a failure ends."""
    limit = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
