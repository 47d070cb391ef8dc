"""Control groups of version 2, by the kernel: what an account may use is held, whoever starts and ends around it.

They run as root where a hierarchy has the controllers; elsewhere tests/unit/launch/test_limits.py has the files alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from whale_nebula.launch.tenancy import Limits, find_cgroup_root
from whale_nebula.security.allowance import Allowance
from whale_nebula.security.tenant import Tenant

ANA = Tenant("ana", "test", "aabbccddee", Allowance(memory=100 << 20, cpus=0.5, processes=20))
TIMEOUT_SECONDS = 60.0
THREADS = """
import threading, time
for number in range(60):
    try:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    except RuntimeError:
        print(number)
        break
"""


@pytest.fixture
def root() -> Path:
    """The hierarchy of this host."""
    found = find_cgroup_root()
    if found is None or not {"memory", "cpu", "pids"} <= set((found / "cgroup.controllers").read_text().split()):
        pytest.skip("no control groups of version 2 with these controllers")
    with contextlib.closing(Limits(ANA, found)) as limits:
        if not limits.enforced_limits:
            pytest.skip("this user can make no control group")
    return found


def run_in_group(limits: Limits, code: str) -> tuple[int, str]:
    """Let a process of the account run code."""
    command = [sys.executable, "-c", f"input()\n{code}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        limits.admit(process.pid)
        out = process.communicate("\n", TIMEOUT_SECONDS)[0]
        return process.returncode, out.strip()


def test_control_group_limits_memory_processes_and_cpus(root: Path) -> None:
    with contextlib.closing(Limits(ANA, root)) as limits:
        assert (limits.enforced_limits, list(limits.list_unenforced())) == (("memory", "cpus", "processes"), [])
        assert run_in_group(limits, "block = b'x' * (300 << 20)")[0] == -9
        assert "tried to use more" in limits.explain_kill() and limits.explain_kill() == ""
        assert run_in_group(limits, THREADS) == (0, "19")
        busy = "import time\nt = time.monotonic()\nwhile time.monotonic() < t + 1: pass"
        assert run_in_group(limits, busy)[0] == 0 and limits.group is not None
        stat = dict(line.split() for line in (limits.group / "cpu.stat").read_text().splitlines())
        assert int(stat["nr_throttled"]) > 0


def test_tiny_cpu_share_is_raised_to_the_kernels_minimum(root: Path) -> None:
    with contextlib.closing(Limits(replace(ANA, allowance=Allowance(cpus=0.001)), root)) as limits:
        assert limits.group is not None and (limits.group / "cpu.max").read_text() == "1000 100000\n"


def test_control_group_is_recreated_after_another_start_removed_it(root: Path) -> None:
    one, other = Limits(ANA, root), Limits(ANA, root)
    one.close()
    assert other.group is not None and not other.group.exists()
    assert run_in_group(other, "print(open('/proc/self/cgroup').read())") == (0, "0::/whale-nebula/ana@test-aabbccdd")
    other.close()
    assert not other.group.exists()


@contextlib.contextmanager
def nested_container_group(root: Path) -> Iterator[Path]:
    """A group with a process in it and with controllers, as a container sees it as its root."""
    inner = root / "whale-nebula-container"
    inner.mkdir()
    for name in ("memory", "cpu", "pids"):
        (root / "cgroup.subtree_control").write_text(f"+{name}")
    try:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            (inner / "cgroup.procs").write_text(str(process.pid))
            yield inner
            process.communicate(b"\n", TIMEOUT_SECONDS)
    finally:
        inner.rmdir()


@pytest.mark.parametrize("allowed", [ANA.allowance, Allowance(cpus=0.5, processes=20)])
def test_control_groups_of_a_container_are_unchanged_and_unused(root: Path, allowed: Allowance) -> None:
    with (
        nested_container_group(root) as inner,
        contextlib.closing(Limits(replace(ANA, allowance=allowed), inner)) as limits,
    ):
        assert (limits.enforced_limits, limits.group) == ((), None) and "cpus: not limited" in list(
            limits.list_unenforced()
        )
        assert (inner / "cgroup.type").read_text() == "domain\n"
        assert (inner / "cgroup.subtree_control").read_text() == ""
        limits.admit(os.getpid())


def test_accounts_with_ambiguous_names_get_separate_groups(root: Path) -> None:
    one = Limits(replace(ANA, cluster="gpu-a", account="b"), root)
    other = Limits(replace(ANA, cluster="gpu", account="a-b"), root)
    assert one.group != other.group
    for each in (one, other):
        each.close()
