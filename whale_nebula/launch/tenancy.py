"""Runs of an account on this host: folder, resource limits, missing isolation, and a log of starts.

Limits are enforced by a control group (version 2) of the kernel if this user may write one, otherwise by polling.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.config import Config
from whale_nebula.errors import AccountError
from whale_nebula.launch.job import list_alive
from whale_nebula.security import Credentials, Files, code
from whale_nebula.security.allowance import format_bytes
from whale_nebula.security.audit import AuditLog
from whale_nebula.security.tenant import Tenant, check_disk_limit, open_home


class OtherStarts(NamedTuple):
    """The process ids of the workers of the other starts, and whether one of these began later."""

    workers: frozenset[int] = frozenset()
    later: bool = False


class StartRecord:
    """The record of a start of an account's workers: a file with their process ids, next to those of its other starts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one, other = StartRecord(Path(folder)), StartRecord(Path(folder))
    ...     other.note({7, 8})
    ...     found = one.find_others(), other.find_others()
    ...     other.close()
    ...     left = one.find_others()
    ...     one.close()
    >>> found
    (OtherStarts(workers=frozenset({8, 7}), later=True), OtherStarts(workers=frozenset(), later=False))
    >>> left
    OtherStarts(workers=frozenset(), later=False)
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(0o700, exist_ok=True)
        self._path = folder / f"{time.time_ns():020d}-{os.getpid()}"
        hidden = folder / f".{self._path.name}"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        hidden.rename(self._path)  # so a file of this name is locked while this process runs
        self._noted: frozenset[int] = frozenset()

    def note(self, workers: Collection[int]) -> None:
        """Write the process ids of this start's workers, if they have changed."""
        if self._noted != frozenset(workers):
            self._noted = frozenset(workers)
            text = "".join(f"{each}\n" for each in sorted(workers)).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))

    def find_others(self) -> OtherStarts:
        """The account's other running starts; files of killed ones are removed."""
        workers: set[int] = set()
        later = False
        for path in sorted(self._path.parent.glob("[0-9]*")):
            if path != self._path:
                with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        path.unlink()
                    except BlockingIOError:
                        workers.update(map(int, file.read().split()))
                        later = later or path.name > self._path.name
        return OtherStarts(frozenset(workers), later)

    def close(self) -> None:
        """Remove the record of this start."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


PROC = Path("/proc")
PARENT = "whale-nebula"
_CONTROLLERS = {"memory": "memory", "cpus": "cpu", "processes": "pids"}
_POLLED_LIMITS = ("memory", "processes")
_SCAN_SECONDS, _SCAN_SHARE = 0.5, 0.05  # at most this share of a core is used to look for new processes
_MOST_WAIT_POLLS = 8  # polls for which a start waits until a later one has ended
_PERIOD = 100_000  # microseconds, for CPUs
_LEAST_QUOTA = 1000  # microseconds: the kernel accepts no less
_TRIES = 3
_MAPPED = re.compile(r"^(?:RssAnon|RssShmem):\s+(\d+)", re.MULTILINE)
_SHARED = re.compile(r"^(?:Pss_Anon|Pss_Shmem):\s+(\d+)", re.MULTILINE)
_THREADS = re.compile(r"^Threads:\s+(\d+)", re.MULTILINE)


def find_cgroup_root() -> Path | None:
    """The mount point of control groups of version 2 on this host; None if there is none."""
    with contextlib.suppress(OSError):
        for line in (PROC / "self/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split(" ")
            if kind == "cgroup2":
                return Path(place)
    return None


class Limits:
    """Resource limits of an account on this host, shared by all its starts; `start` is the record of this one.
    `enforced_limits` are those that its control group enforces, in the hierarchy at `root`; some of the others are
    polled.
    """

    def __init__(self, tenant: Tenant, root: Path | None, start: StartRecord | None = None) -> None:
        self.tenant = tenant
        self._root, self._start, self._wait_polls = root, start, 0
        self._other_processes: frozenset[int] = frozenset()
        self._has_later_start = False
        self.limit_names = [name for name in _CONTROLLERS if name in tenant.allowance.limits]
        self.group: Path | None = None
        self.enforced_limits: tuple[str, ...] = ()
        self._own_processes: frozenset[int] = frozenset()
        self._next_scan = 0.0
        if root is not None and self.limit_names:
            self._open_group(root)
        self._kills = self._count_kills()

    # ------------------------------------------------------------------ limits of the kernel
    def _open_group(self, root: Path) -> None:
        """Create the control group, and set the limits that the kernel supports."""
        group = self._group_path(root)
        if _is_occupied(root):
            return
        for _ in range(_TRIES):  # another start of the account, which ends, may remove the group meanwhile
            try:
                there = (root / "cgroup.controllers").read_text().split()
                (root / PARENT).mkdir(exist_ok=True)
                for place in (root, root / PARENT):
                    for name in self.limit_names:
                        if _CONTROLLERS[name] in there:
                            with contextlib.suppress(OSError):  # one that cannot be enabled is missing in the group
                                _write_kernel_file(place / "cgroup.subtree_control", f"+{_CONTROLLERS[name]}")
                group.mkdir(exist_ok=True)
            except FileNotFoundError:
                continue
            except OSError:
                break
            self.enforced_limits = tuple(name for name in self.limit_names if self._set_limit(group, name))
            if self.enforced_limits and group.exists():
                self.group = group
                return
        self.group, self.enforced_limits = None, ()
        _remove_group(group)

    def _group_path(self, root: Path) -> Path:
        tenant = self.tenant
        return root / PARENT / f"{tenant.account}@{tenant.cluster}-{tenant.authority[:8]}"  # no name has an "@" in it

    def _set_limit(self, group: Path, name: str) -> bool:
        value = self.tenant.allowance.limits[name]
        try:
            if name == "memory":
                _write_kernel_file(group / "memory.max", str(value))
                with contextlib.suppress(OSError):  # a kernel without swap has none
                    _write_kernel_file(group / "memory.swap.max", "0")
            elif name == "cpus":
                _write_kernel_file(group / "cpu.max", f"{max(_LEAST_QUOTA, round(value * _PERIOD))} {_PERIOD}")
            else:
                _write_kernel_file(group / "pids.max", str(value))
        except OSError:
            return False
        return True

    def admit(self, process: int) -> None:
        """Add a process that was just started to the group, and what it has started already. What it starts later is in
        the group from its beginning.
        """
        if self.group is None:
            return
        group, enforced_limits = self.group, self.enforced_limits
        failure = _move_process(group, process)
        if failure is not None and self._root is not None and not group.exists():
            self._open_group(self._root)  # another start of the account, which ended, has removed it
            self._kills = self._count_kills()
            if self.group is not None and self.enforced_limits == enforced_limits:
                failure = _move_process(self.group, process)
        if failure is not None or self.group is None:
            what = f"cannot apply the limits of {self.tenant} to its workers"
            why = None if failure is None else failure.strerror
            raise AccountError(what, where=str(group), why=why, mend=f"rmdir {group}")
        moved = {process}
        for _ in range(_TRIES):
            found = set(_find_processes([process])) - moved
            for each in found:
                _move_process(group, each)  # or it has ended meanwhile
            moved |= found

    def _count_kills(self) -> int:
        """The number of the group's processes that the kernel has killed for their memory."""
        with contextlib.suppress(OSError, ValueError):
            if self.group is not None:
                events = dict(line.split() for line in (self.group / "memory.events").read_text().splitlines())
                return int(events.get("oom_kill", 0))
        return 0

    def explain_kill(self) -> str:
        """Why the kernel has killed one of these processes, if it has."""
        killed, self._kills = self._count_kills() > self._kills, self._count_kills()
        return self._describe("memory", "tried to use more") if killed else ""

    def close(self) -> None:
        """Remove the group, unless another start of the account is in it."""
        if self.group is not None:
            _remove_group(self.group)
        if self._start is not None:
            self._start.close()

    # ------------------------------------------------------------------ polled limits
    def find_excess(self, workers: Collection[int]) -> str:
        """The polled limit that the account exceeds, in words, if these workers must end for it. Where several starts
        exceed one together, the last of them ends, and the others wait for that.
        """
        polled_limits = [
            name for name in _POLLED_LIMITS if name in self.limit_names and name not in self.enforced_limits
        ]
        if not polled_limits:
            return ""
        self._scan(workers)
        statuses = dict(_read_all(self._own_processes | self._other_processes, "status"))
        own = self._find_excess(
            polled_limits, {each: text for each, text in statuses.items() if each in self._own_processes}
        )
        if own or not self._other_processes:
            return own
        found = self._find_excess(polled_limits, statuses)
        self._wait_polls = self._wait_polls + 1 if found else 0
        return found if found and (not self._has_later_start or self._wait_polls > _MOST_WAIT_POLLS) else ""

    def _scan(self, workers: Collection[int]) -> None:
        """Look for new processes, at intervals."""
        now = time.monotonic()
        if now < self._next_scan:
            return
        if self._start is not None:
            self._start.note(workers)
            others, self._has_later_start = self._start.find_others()
            self._other_processes = frozenset(_find_processes(others)) if others else others
        self._own_processes = frozenset(_find_processes(workers))
        taken = time.monotonic() - now
        self._next_scan = now + max(_SCAN_SECONDS, taken / _SCAN_SHARE)

    def _find_excess(self, polled_limits: Collection[str], statuses: Mapping[int, str]) -> str:
        limits = self.tenant.allowance.limits
        if "processes" in polled_limits:
            count = sum(int(found[1]) for text in statuses.values() if (found := _THREADS.search(text)))
            if count > limits["processes"]:
                return self._describe("processes", f"have {count}")
        if "memory" in polled_limits and _sum_bytes(statuses.values(), _MAPPED) > limits["memory"]:
            exact = dict(_read_all(statuses, "smaps_rollup"))  # slower; a process can make it unreadable
            hidden = [text for each, text in statuses.items() if each not in exact]
            used = _sum_bytes(exact.values(), _SHARED) + _sum_bytes(hidden, _MAPPED)
            if used > limits["memory"]:
                return self._describe("memory", f"use {format_bytes(used)}")
        return ""

    def _describe(self, name: str, found: str) -> str:
        limit = self.tenant.allowance.limits[name]
        most = f"{limit:g} processes and threads" if name == "processes" else f"{format_bytes(limit)} of {name}"
        return f"{self.tenant} is limited to {most} per host, and its workers {found}"

    def list_unenforced(self) -> Iterator[str]:
        """The limits that the kernel does not enforce, in words."""
        left = [name for name in self.limit_names if name not in self.enforced_limits]
        polled_limits = [name for name in left if name in _POLLED_LIMITS]
        if polled_limits:
            yield f"{' and '.join(polled_limits)}: checked four times a second"
        if "cpus" in left:
            yield "cpus: not limited"


def _is_occupied(root: Path) -> bool:
    """Whether processes are in the root of a hierarchy, as in a container: then its groups cannot have controllers. The
    root of a host, which has no type, may have processes.
    """
    with contextlib.suppress(OSError):
        return (root / "cgroup.type").exists() and bool((root / "cgroup.procs").read_text().strip())
    return False


def _move_process(group: Path, process: int) -> OSError | None:
    """Move a process into a group; returns the error if it cannot be moved."""
    try:
        _write_kernel_file(group / "cgroup.procs", str(process))
    except OSError as error:
        return error
    return None


def _write_kernel_file(path: Path, text: str) -> None:
    """Write a kernel file, which may not exist."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _remove_group(group: Path) -> None:
    for place in (group, group.parent):
        with contextlib.suppress(OSError):  # it is not empty
            place.rmdir()


def _find_processes(workers: Collection[int]) -> Iterator[int]:
    """These processes, their groups, and all their descendants, in any group or session."""
    found = set(workers)
    groups = set(workers)
    children: dict[int, list[int]] = {}
    for process, parent, group in list_alive():
        children.setdefault(parent, []).append(process)
        if group in groups:
            found.add(process)
    left = list(found)
    for each in left:  # grows during iteration
        left += [child for child in children.get(each, ()) if child not in found]
        found.update(children.get(each, ()))
    yield from found


def _read_all(processes: Collection[int], name: str) -> Iterator[tuple[int, str]]:
    for process in processes:
        with contextlib.suppress(OSError):
            yield process, (PROC / str(process) / name).read_text("utf-8", "replace")


def _sum_bytes(texts: Collection[str], line: re.Pattern[str]) -> int:
    return sum(int(found) << 10 for text in texts for found in line.findall(text))


AUDIT, STARTS = "audit", "starts"


def describe_policy(config: Config, source: str | None) -> dict[str, Any]:
    """The restrictions of a config, for the record of a start: what may not cross, whether programs need an approval,
    and the digest of its file.
    """
    found: dict[str, Any] = {"forbid": [str(each) for each in config.forbid]}
    found["needs_approval"] = config.approvals is not None
    with contextlib.suppress(OSError):
        found["config"] = hashlib.sha256(Path(source or "").read_bytes()).hexdigest()
    return found


@dataclass(frozen=True)
class Tenancy:
    """The launcher's resources for an account: its folder `home`, with the `log` in it."""

    tenant: Tenant
    home: Path
    limits: Limits
    log: AuditLog

    def note_start(self, workers: Sequence[str], script: str, epoch: int, policy: Mapping[str, Any]) -> None:
        """Log a start before it happens: what is started, with which versions, under which `policy` of the config."""
        program = {"script": Path(script).name, "sha256": hashlib.sha256(Path(script).read_bytes()).hexdigest()}
        versions = code.describe_versions()
        self._note("start run", "allow", workers=list(workers), **program, epoch=epoch, versions=versions, **policy)

    def note_refusal(self, script: str, reason: str, policy: Mapping[str, Any]) -> None:
        """Log a start that is refused."""
        self._note("start run", "deny", reason, script=Path(script).name, **policy)

    def note_end(self, codes: Mapping[str, int], excess: str, epoch: int) -> None:
        """Log how a start ended; `excess` is the limit that it exceeded."""
        self._note("end run", "deny" if excess else "", excess, codes=dict(codes), epoch=epoch)

    def _note(self, action: str, decision: str, reason: str = "", **more: Any) -> None:
        details = {"account": self.tenant.account, "limits": self.tenant.allowance.limits, **more}
        self.log.record(
            action, actor=self.log.identity, decision=decision, reason=reason, durable=True,
            held=list(self.limits.enforced_limits), **details,
        )  # fmt: skip


@contextlib.contextmanager
def open_tenancy(
    tenant: Tenant | None,
    base: Path,
    security: Mapping[str, Files],
    report: Callable[[str], None],
) -> Iterator[Tenancy | None]:
    """Context with the resources of an account, None for a run without one; `report` is called with lines on its
    folder, its limits and missing isolation.
    """
    if tenant is None:
        yield None
        return
    home = open_home(base, tenant)
    credentials = Credentials.load(next(iter(security.values())))
    log = AuditLog(home / AUDIT / f"{credentials.identity.stem}.jsonl", credentials.identity, credentials)
    limits = Limits(tenant, find_cgroup_root(), StartRecord(home / STARTS))
    try:
        try:
            check_disk_limit(tenant, [home])
        except AccountError as error:
            log.record(
                "start run", actor=log.identity, decision="deny", reason=error.what, account=tenant.account,
                limits=tenant.allowance.limits,
            )  # fmt: skip
            raise
        allowed = replace(tenant.allowance, line=None)
        may = f"; limits on this host: {allowed}" * bool(allowed)
        report(f"{tenant}: folder {home}{may}")
        for each in list_unisolated(home, limits):
            report(f"not isolated: {each}")
        yield Tenancy(tenant, home, limits, log)
    finally:
        limits.close()
        log.close("the launcher has ended")


def list_unisolated(home: Path, limits: Limits) -> Iterator[str]:
    """Sentences on the isolation that this account lacks on this host."""
    unheld = list(limits.list_unenforced())
    if unheld:
        yield f"{'; '.join(unheld)} (this user cannot create a version 2 control group)"
    near = [each for each in home.parent.parent.glob("*/*") if each != home and _is_own(each)]
    if near:
        names = ", ".join(sorted(f"{each.name} of {each.parent.name}" for each in near))
        yield f"{names} and this account run as the same user, so their scripts can read each other's files"


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir() and path.stat().st_uid == os.geteuid()
    return False
