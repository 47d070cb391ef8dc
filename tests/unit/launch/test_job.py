"""Jobs of real processes: their identity, their connections, and their end."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.unit.gateway.networks import wait_until
from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError, DeadlineError, RemoteFailureError
from whale_nebula.launch import Job, Result, spawn
from whale_nebula.launch.attach import Identity
from whale_nebula.launch.job import end_group, list_group_members
from whale_nebula.launch.placement import Placement
from whale_nebula.launch.worker_output import Sink
from whale_nebula.launch.worker_processes import Output, create_identities, derive_seed, start_workers
from whale_nebula.security import Files
from whale_nebula.security.tenant import Tenant

SOON = 60.0
TWO = {"gpu/0": "gpu", "npu/0": "npu"}
THREE = {**TWO, "npu/1": "npu"}

START = """
import pathlib, sys, time
from whale_nebula.launch import attach
me = attach()
"""


def run(code: str, workers: dict[str, str] = TWO, deadline: float = SOON, **options: object) -> Result:
    with spawn(["-c", START + code], workers, **options) as job:
        return job.wait(deadline)


def test_workers_receive_their_identity() -> None:
    code = "print(me.worker, me.cluster, sorted(me.peers.items()), me.run_id, me.seed, attach() is me)"
    result = run(code, THREE, run_id="r7", seed=11).check()
    assert {name: outcome.out for name, outcome in result.outcomes.items()} == {
        "gpu/0": "gpu/0 gpu [('npu/0', 'npu'), ('npu/1', 'npu')] r7 11 True\n",
        "npu/0": "npu/0 npu [('gpu/0', 'gpu'), ('npu/1', 'npu')] r7 11 True\n",
        "npu/1": "npu/1 npu [('gpu/0', 'gpu'), ('npu/0', 'npu')] r7 11 True\n",
    }


def test_killed_worker_is_the_culprit_and_others_exit_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_nebula.launch.job._TERM_SECONDS", SOON)
    code = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
time.sleep(300)
"""
    ready: list[str] = []
    with spawn(["-c", START + code], TWO, echo=lambda worker, stream, line: ready.append(line)) as job:
        wait_until(lambda: ready.count("ready\n") == 2)
        start = time.monotonic()
        job.signal("npu/0", signal.SIGKILL)
        result = job.wait(SOON, grace=0.2)
    assert time.monotonic() - start < SOON / 2
    assert result.codes == {"gpu/0": 3, "npu/0": -signal.SIGKILL}
    assert (result.culprit, result.late) == ("npu/0", False)
    assert result.outcomes["gpu/0"].out == "ready\n"
    with pytest.raises(RemoteFailureError, match="worker 'npu/0' ended with exit code -9"):
        result.check()


def test_failure_kills_remaining_workers_after_the_grace_period(tmp_path: Path) -> None:
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
        wait_until(lambda: ready.count("ready\n") == 2)
        (tmp_path / "go").touch()
        result = job.wait(SOON, grace=0.2)
    assert result.codes == {"gpu/0": -signal.SIGKILL, "npu/0": 1}
    assert result.culprit == "npu/0"
    with pytest.raises(RemoteFailureError, match="something broke"):
        result.check()


def test_workers_are_killed_at_the_deadline() -> None:
    start = time.monotonic()
    result = run("time.sleep(300)", deadline=0.5)
    assert time.monotonic() - start < SOON / 2
    assert result.codes == {"gpu/0": -signal.SIGKILL, "npu/0": -signal.SIGKILL}
    assert (result.culprit, result.late) == (None, True)
    with pytest.raises(DeadlineError, match="gpu/0, npu/0"):
        result.check()


def test_workers_and_their_descendants_end_with_the_launcher() -> None:
    started = "subprocess.Popen(['sleep', '300'], start_new_session=True).pid"
    child = f"import subprocess, time; print({started}, flush=True); time.sleep(300)"
    code = f"""
import os, subprocess, sys, time
{START}
one = {started}
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(os.getpid(), one, child.pid, int(child.stdout.readline()), flush=True)
time.sleep(300)
"""
    launcher = f"""
import time
from whale_nebula.launch import spawn
with spawn(["-c", {code!r}], {{"gpu/0": "gpu"}}, echo=lambda *event: print(event[2], flush=True)):
    time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4 and all(is_alive(pid) for pid in pids)
    process.kill()
    process.wait(SOON)
    process.stdout.close()
    try:
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_output_is_captured_per_stream_and_echoed_by_line() -> None:
    code = "import os; print('out', flush=True); print('err', file=sys.stderr); print(os.environ['EXTRA'], end='')"
    lines: list[tuple[str, str, str]] = []
    environment = {"EXTRA": "no newline"}
    result = run(code, {"gpu/0": "gpu"}, echo=lambda *each: lines.append(each), env=environment).check()
    assert (result.outcomes["gpu/0"].out, result.outcomes["gpu/0"].err) == ("out\nno newline", "err\n")
    assert "EXTRA" not in os.environ
    assert sorted(lines) == [("gpu/0", "err", "err\n"), ("gpu/0", "out", "no newline"), ("gpu/0", "out", "out\n")]


def test_job_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one worker"), spawn(["-c", ""], {}):
        pass


def test_ended_or_failed_job_leaks_no_file_descriptors() -> None:
    run("pass").check()
    before = psutil.Process().num_fds()
    run("pass").check()
    with pytest.raises(FileNotFoundError), spawn(["-c", ""], TWO, cwd="/nowhere/at/all"):
        pass
    assert psutil.Process().num_fds() == before


PLACEMENT = Placement(("gpu/0", "npu/0"), {"gpu/0": "127.0.0.1:7101", "npu/0": "127.0.0.1:7102"})
FILES = Files(Path("ca"), Path("cert"), Path("key"))
CONFIG = load(
    {
        "run": "mt",
        "clusters": {"gpu": {"gateway": "10.0.0.9:7100"}, "npu": {}},
        "patience": "20s",
        "security": {"insecure": True},
    }
)


def start_job(code: str, output: Path, workers: Mapping[str, Identity] | None = None, **options: object) -> Job:
    with (output / "out").open("wb") as out, (output / "err").open("wb") as err:
        sinks = {"out": Sink(os.dup(out.fileno())), "err": Sink(os.dup(err.fileno()))}
    identities = workers or create_identities(PLACEMENT, CONFIG, {})
    return start_workers(["-c", "import os" + START + code], identities, output=Output(sinks), **options)  # type: ignore[arg-type]


def test_files_of_an_account_are_readable_by_its_user_only(tmp_path: Path) -> None:
    alone = Placement(("gpu/0",), {"gpu/0": "127.0.0.1:7101"})
    tenant, code = Tenant("ana", "gpu", "aa"), "print(me.tenant.account)\nopen('weights', 'w')\nos.mkdir('runs')"
    identities = {
        name: replace(each, tenant=tenant, home=str(tmp_path))
        for name, each in create_identities(alone, CONFIG, {}).items()
    }
    with start_job(code, tmp_path, identities, cwd=tmp_path) as job:
        job.wait(SOON).check()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("weights", "runs")]
    assert modes == [0o600, 0o700] and (tmp_path / "out").read_text() == "ana\n"


class TestIdentities:
    def test_identity_has_all_fields_of_the_config(self) -> None:
        found = create_identities(PLACEMENT, CONFIG, {}, path="clusters.yaml")["gpu/0"]
        assert found == Identity(
            worker="gpu/0",
            cluster="gpu",
            peers={"npu/0": "npu"},
            addresses={"npu/0": "127.0.0.1:7102"},
            run_id="mt",
            seed=derive_seed(CONFIG),
            listen="127.0.0.1:7101",
            insecure=True,
            gateway="10.0.0.9:7100",
            patience=20.0,
            config=str(Path("clusters.yaml").absolute()),
        )

    def test_identity_with_certificates_other_address_and_no_gateway(self) -> None:
        config = Config(run="mt", clusters=CONFIG.clusters)
        files = dict.fromkeys(PLACEMENT.here, FILES)
        listen = {"gpu/0": "0.0.0.0:7101", "npu/0": "0.0.0.0:7102"}
        found = create_identities(PLACEMENT, config, files, listen=listen, gateways=False)
        assert (found["gpu/0"].security, found["gpu/0"].listen, found["gpu/0"].gateway) == (FILES, "0.0.0.0:7101", None)
        assert found["gpu/0"].addresses["npu/0"] == "127.0.0.1:7102"

    def test_identities_are_of_workers_on_this_host(self) -> None:
        here = Placement(("npu/0",), PLACEMENT.addresses)
        assert list(create_identities(here, CONFIG, {})) == ["npu/0"]


def test_stopped_worker_is_reported_frozen_and_killed(tmp_path: Path) -> None:
    notices: list[str] = []
    code = "me.heartbeat_sender.send(stepped=True); time.sleep(300)"
    with start_job(code, tmp_path, silence=2.0, notice=notices.append) as job:
        wait_until(lambda: all(each.first_step_at for each in job._monitor.statuses.values()))  # each was heard
        os.kill(job.pids["npu/0"], signal.SIGSTOP)
        result = job.wait(SOON, grace=0.1)
    assert (result.culprit, result.frozen, result.late) == ("npu/0", {"npu/0"}, False)
    assert result.codes["npu/0"] == -signal.SIGKILL
    assert notices == ["worker npu/0 is frozen (no heartbeat for 2 s): killing it"]


def test_worker_that_hangs_at_exit_keeps_its_exit_code(tmp_path: Path) -> None:
    """As a library may hold it up that gives back its connections when no thread of Python is left."""
    notices: list[str] = []
    code = """
class Library:
    def __del__(self, sleep=time.sleep): sleep(300)
if me.cluster == "npu": sys.modules["library"] = Library()
me.heartbeat_sender.code = 1
sys.exit("NB-402 no message from worker 'gpu/0'")
"""
    with start_job(code, tmp_path, silence=2.0, ending=2.5, notice=notices.append) as job:
        result = job.wait(SOON, grace=SOON)
    assert (result.codes, result.frozen, result.late) == ({"gpu/0": 1, "npu/0": 1}, frozenset(), False)
    assert notices == ["worker npu/0 has ended, but its process has not exited for 2.5 s: killing it"]


def test_deadline_does_not_change_the_exit_code_of_a_worker_that_hangs_at_exit(tmp_path: Path) -> None:
    code = "me.heartbeat_sender.code = 75\nme.heartbeat_sender.announce_exit()\ntime.sleep(300)"
    with start_job(code, tmp_path, silence=SOON, ending=SOON) as job:
        wait_until(lambda: all(each.ends for each in job._monitor.statuses.values()))
        result = job.wait(0.0)
    assert (result.codes, result.late, result.culprit) == ({"gpu/0": 75, "npu/0": 75}, False, "gpu/0")


def test_leaving_workers_are_awaited_with_patience(tmp_path: Path) -> None:
    code = "if me.cluster == 'npu': time.sleep(0.3)\nsys.exit(75)"
    with start_job(code, tmp_path) as job:
        result = job.wait(SOON, grace=0.0, patience=SOON)
    assert result.codes == {"gpu/0": 75, "npu/0": 75}
    assert result.culprit in result.codes


def test_worker_that_saves_after_a_failure_is_awaited_with_patience(tmp_path: Path) -> None:
    """It has finished saving when the grace period of the failure is over, and exits some time later."""
    grace, folder = 3.0, tmp_path
    code = f"""
saves, saved = (pathlib.Path({str(folder)!r}, name) for name in ("saves", "saved"))
if me.cluster == "gpu":
    while not saves.exists(): time.sleep(0.01)
    sys.exit(3)
me.heartbeat_sender.send(saving=True)
saves.touch()
while not saved.exists(): time.sleep(0.01)
me.heartbeat_sender.send(saving=False)
time.sleep(0.4)
sys.exit(4)
"""

    def finish_saving_after_grace() -> None:
        wait_until(lambda: job._limit < time.monotonic() + grace, SOON)
        limit = job._limit
        wait_until(lambda: job._limit > limit, SOON)
        (folder / "saved").touch()

    with start_job(code, folder) as job:
        finishing = threading.Thread(target=finish_saving_after_grace, daemon=True)
        finishing.start()
        result = job.wait(SOON, grace=grace, patience=SOON)
        finishing.join(SOON)
    assert (result.culprit, result.codes) == ("gpu/0", {"gpu/0": 3, "npu/0": 4})


def test_failed_worker_is_the_culprit_not_one_that_left_before(tmp_path: Path) -> None:
    steps = "me.heartbeat_sender.send(saved=7) if me.cluster == 'gpu' else me.heartbeat_sender.send(saved=9)\n"
    code = steps + "if me.cluster == 'gpu': sys.exit(75)\ntime.sleep(0.3); sys.exit(3)"
    with start_job(code, tmp_path) as job:
        result = job.wait(SOON, patience=SOON)
    assert (result.culprit, result.codes["npu/0"], result.saved) == ("npu/0", 3, 9)


def test_descendants_of_an_ended_worker_are_killed(tmp_path: Path) -> None:
    code = """
import subprocess
if me.cluster == "gpu":
    print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
else:
    time.sleep(300)
"""
    with start_job(code, tmp_path) as job:
        wait_until(lambda: (tmp_path / "out").read_text().endswith("\n"))
        pid = int((tmp_path / "out").read_text())
        wait_until(lambda: not is_alive(pid))
        assert is_alive(job.pids["npu/0"])


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(300)
"""


def test_descendants_that_ignore_sigterm_have_ended_when_the_job_ends(tmp_path: Path) -> None:
    """One of them is in the worker's process group, one in a session of its own, in a worker that ignores it, too."""
    code = f"""
import signal, subprocess
npu, command = me.cluster == "npu", [sys.executable, "-c", {STUBBORN!r}]
started = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=npu)
started.stdout.readline()
if npu: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(started.pid, flush=True)
time.sleep(300)
"""
    with start_job(code, tmp_path) as job:
        wait_until(lambda: (tmp_path / "out").read_text().count("\n") == 2)
        job.kill(gently=True)
    pids = [int(line) for line in (tmp_path / "out").read_text().split()]
    assert [pid for pid in pids if is_alive(pid)] == []


LEADER = f"""
import subprocess, sys
subprocess.Popen(["sleep", "300"])
stubborn = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
stubborn.stdout.readline()
"""


def test_end_group_kills_the_members_of_a_zombie_leader() -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER], process_group=0)
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    assert len(list_group_members(leader.pid)) == 2
    end_group(leader.pid, linger=0.1)
    assert leader.wait(60) == 0
    assert group_ends(leader.pid)


def group_ends(number: int) -> bool:
    for _ in range(3000):
        if not list_group_members(number):
            return True
        os.sched_yield()
    return False


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
