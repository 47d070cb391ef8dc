"""Resource limits of an account on a host: by the kernel, and by measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.gateway.networks import wait_until
from tests.unit.launch.test_job import SOON, start_job
from whale_nebula.config import load
from whale_nebula.errors import AccountError
from whale_nebula.launch import Outcome, Result
from whale_nebula.launch import tenancy as tenancy_module
from whale_nebula.launch.heartbeat import read_process_state
from whale_nebula.launch.placement import Placement
from whale_nebula.launch.restarts import find_failure
from whale_nebula.launch.tenancy import Limits, StartRecord, find_cgroup_root, list_unisolated
from whale_nebula.launch.worker_processes import create_identities
from whale_nebula.security.allowance import Allowance
from whale_nebula.security.tenant import Tenant, open_home

ALLOWED = Allowance(memory=1 << 30, cpus=1.5, processes=200)
ANA = Tenant("ana", "gpu", "aabbccddee", ALLOWED)
GROUP = "whale-nebula/ana@gpu-aabbccdd"
FILES = ("memory.max", "memory.swap.max", "cpu.max", "pids.max", "cgroup.procs")


@pytest.fixture
def hierarchy(tmp_path: Path) -> Path:
    """The files that the kernel makes in a hierarchy of version 2, with a group of the account in it."""
    (tmp_path / GROUP).mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    for folder in (tmp_path, tmp_path / "whale-nebula"):
        (folder / "cgroup.subtree_control").touch()
    for name in FILES:
        (tmp_path / GROUP / name).touch()
    (tmp_path / GROUP / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    return tmp_path


def test_control_group_files_have_the_accounts_limits(hierarchy: Path) -> None:
    limits = Limits(ANA, hierarchy)
    limits.admit(4711)
    assert [(hierarchy / GROUP / name).read_text() for name in FILES] == [
        "1073741824",
        "0",
        "150000 100000",
        "200",
        "4711",
    ]
    assert (limits.enforced_limits, list(limits.list_unenforced())) == (("memory", "cpus", "processes"), [])
    assert limits.find_excess([os.getpid()]) == "" == limits.explain_kill()
    (hierarchy / GROUP / "memory.events").write_text("oom_kill 2\n")
    assert limits.explain_kill() == (
        "account ana of gpu is limited to 1 GiB of memory per host, and its workers tried to use more"
    )
    assert limits.explain_kill() == ""


def test_limits_without_a_controller_are_polled_or_listed(hierarchy: Path) -> None:
    (hierarchy / GROUP / "memory.max").unlink()
    (hierarchy / GROUP / "cpu.max").unlink()
    limits = Limits(ANA, hierarchy)
    assert limits.enforced_limits == ("processes",)
    assert list(limits.list_unenforced()) == [
        "memory: checked four times a second", "cpus: not limited"
    ]  # fmt: skip
    assert next(iter(Limits(ANA, None).list_unenforced())).startswith("memory and processes: checked")
    assert Limits(replace(ANA, allowance=Allowance()), hierarchy).enforced_limits == ()


def test_failed_move_into_the_group_is_refused(hierarchy: Path) -> None:
    limits = Limits(ANA, hierarchy)
    (hierarchy / GROUP / "cgroup.procs").unlink()
    with pytest.raises(AccountError, match="cannot apply the limits of"):
        limits.admit(os.getpid())


def test_occupied_root_is_left_unchanged(hierarchy: Path) -> None:
    """As in a container: the kernel would make its root one of threads, and take no process into the group."""
    (hierarchy / "cgroup.type").write_text("domain\n")
    (hierarchy / "cgroup.procs").write_text("1\n")
    limits = Limits(ANA, hierarchy)
    assert (limits.enforced_limits, (hierarchy / "cgroup.subtree_control").read_text()) == ((), "")


def test_failed_enabling_of_controllers_is_ignored(hierarchy: Path) -> None:
    (hierarchy / "cgroup.subtree_control").unlink()
    # Whose files are there all the same.
    assert Limits(ANA, hierarchy).enforced_limits == (
        "memory",
        "cpus",
        "processes",
    )


def test_admit_moves_a_process_and_its_children_into_the_group() -> None:
    """Where this host has such a hierarchy and lets this user write it, with whatever controllers it has."""
    root = find_cgroup_root()
    if root is None or not os.access(root / "cgroup.procs", os.W_OK):
        pytest.skip("no control groups of version 2 that can be written")
    group = root / "whale-nebula-test"
    limits = Limits(ANA, None)
    group.mkdir()
    limits.group = group
    code = (
        "import os\nchild = os.fork()\nprint(child, flush=True) if child else None\nos.read(0, 9)\nif child: os.wait()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        child = int(process.stdout.readline())  # which it has started before it is in the group
        limits.admit(process.pid)
        where = [Path(f"/proc/{each}/cgroup").read_text() for each in (process.pid, child)]
        process.communicate(b"", SOON)
    limits.close()
    assert all("0::/whale-nebula-test" in each for each in where) and not group.exists()


ALLOCATE = "import os, subprocess\nblock = bytearray(os.urandom(1 << 20) * 400)\ntime.sleep(300)"
ALLOCATE_IN_CHILD = (
    "import subprocess\ncode = 'import os, time; block = bytearray(os.urandom(1 << 20) * 400); time.sleep(300)'\n"
    "print(subprocess.Popen([sys.executable, '-c', code], start_new_session=True).pid, flush=True)\ntime.sleep(300)"
)
THREADS = (
    "import threading\nfor _ in range(40): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
)
EXCESSES = {
    "memory": (ALLOCATE, Allowance(memory=300 << 20), "is limited to 300 MiB of memory per host, and its workers use "),
    "memory of a child in another session": (
        ALLOCATE_IN_CHILD,
        Allowance(memory=300 << 20),
        "limited to 300 MiB of memory",
    ),
    "threads": (
        THREADS + "time.sleep(300)",
        Allowance(processes=30),
        "limited to 30 processes and threads per host, and",
    ),
}


@pytest.mark.parametrize(
    ("code", "allowed", "message"),
    [pytest.param(*each, marks=pytest.mark.grid if name == "memory" else ()) for name, each in EXCESSES.items()],
    ids=EXCESSES,
)
def test_worker_over_its_limit_is_killed_with_its_descendants(
    code: str, allowed: Allowance, message: str, tmp_path: Path
) -> None:
    config = load({"run": "mt", "security": {"insecure": True}})
    identities = create_identities(Placement(("gpu/0",), {"gpu/0": "127.0.0.1:7101"}), config, {})
    notices: list[str] = []
    limits = Limits(replace(ANA, allowance=allowed), None)
    with start_job(code, tmp_path, identities, enforcer=limits, notice=notices.append) as job:
        result = job.wait(SOON)
    assert message in result.excess and f"{result.excess}: killing them" in notices
    failure = find_failure(result)
    assert failure is not None and str(failure) == f"worker gpu/0 failed first: it was killed: {result.excess}"
    assert failure.recurring == "NB-431"  # so it is not started again
    children = (tmp_path / "out").read_text().split()
    wait_until(
        lambda: (
            not any(
                read_process_state(int(child)) and read_process_state(int(child)).state not in "ZX"
                for child in children
            )
        )
    )


def test_latest_of_several_starts_ends_when_they_exceed_a_limit(tmp_path: Path) -> None:
    code = "import os; block = bytearray(os.urandom(1 << 20) * 200); print(1, flush=True); input()"
    command, pipes = [sys.executable, "-c", code], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:  # type: ignore[call-overload]
        for each in (one, other):
            assert each.stdout.readline()
        tenant = replace(ANA, allowance=Allowance(memory=300 << 20))
        first, latest = (Limits(tenant, None, StartRecord(tmp_path / "starts")) for _ in range(2))
        assert first.find_excess([one.pid]) == ""
        assert "is limited to 300 MiB of memory per host, and its workers use 4" in latest.find_excess([other.pid])
        first._next_scan = 0.0
        excesses = [first.find_excess([one.pid]) for _ in range(10)]
        # The latest may be stopped, and end nothing.
        assert excesses[:8] == [""] * 8 and "limited to 300 MiB" in excesses[-1]
        latest.close()
        first._next_scan = 0.0
        assert first.find_excess([one.pid]) == ""
        first.close()
        for each in (one, other):
            each.communicate(b"\n", SOON)


def test_process_with_unreadable_maps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one can that is not dumpable; to root nothing is hidden, so the files are not looked for here."""
    read = tenancy_module._read_all
    monkeypatch.setattr(
        tenancy_module, "_read_all", lambda pids, name: read((), name) if name == "smaps_rollup" else read(pids, name)
    )
    found = Limits(replace(ANA, allowance=Allowance(memory=1 << 20)), None).find_excess([os.getpid()])
    assert "limited to 1 MiB of memory" in found


def test_unexplained_sigkill_is_reported_as_a_signal() -> None:
    result = Result({"gpu/0": Outcome("gpu/0", -9, "", "")}, "gpu/0", late=False)
    assert str(find_failure(result)).endswith("ended by SIGKILL")


def test_accounts_of_the_same_user_are_reported_as_not_isolated(tmp_path: Path) -> None:
    home = open_home(tmp_path, ANA)
    open_home(tmp_path, replace(ANA, account="bob"))
    texts = list(list_unisolated(home, Limits(ANA, None)))
    assert texts[0].endswith("(this user cannot create a version 2 control group)")
    assert texts[1].startswith("bob of gpu and this account run as the same user")
