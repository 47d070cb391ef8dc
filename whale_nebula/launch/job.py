"""Supervise the running workers of a run on this host: watch, interrupt and kill them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from whale_nebula.errors import DeadlineError, RemoteFailureError
from whale_nebula.launch.heartbeat import ENDING_SECONDS, SILENCE_SECONDS, HeartbeatMonitor, WorkerStatus, read_stat
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL

GRACE_SECONDS = 5.0
_TERM_SECONDS = 1.0
_KILLED_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_LAUNCHER_SIGNALS = (-signal.SIGTERM, -signal.SIGKILL)


class Reader(Protocol):
    """Consumer of a process's output."""

    def close(self) -> tuple[str, str]:
        """Called when the process has ended: returns the retained output and errors."""


class LimitEnforcer(Protocol):
    """Enforces resource limits on processes."""

    def admit(self, process: int) -> None:
        """Register a process that was just started."""

    def find_excess(self, workers: Collection[int]) -> str:
        """The limit that these processes and their descendants exceed, in words, or "". Called often."""

    def explain_kill(self) -> str:
        """Why the kernel has killed one of them, or ""."""


@dataclass(frozen=True)
class Outcome:
    """How one worker ended: exit code (negative: the signal), output, and the status it sent to its launcher."""

    worker: str
    code: int
    out: str
    err: str
    status: WorkerStatus = field(default_factory=WorkerStatus)


@dataclass(frozen=True)
class Result:
    """How a job ended. `culprit` is the worker that failed first; `late` means that the deadline passed.

    `frozen` are the workers that were killed because their heartbeats stopped while they worked. Workers that do not
    exit after their last message are killed, too; their exit code is the one that they announced, and they are not
    late. `trained` is the time in seconds from the first step to the first failure; None if no step was taken. `saved`
    is the newest saved step that any worker reported; None if there is none. `excess` names the limit for which they
    were killed, if they were.
    """

    outcomes: Mapping[str, Outcome]
    culprit: str | None
    late: bool
    frozen: frozenset[str] = frozenset()
    trained: float | None = None
    saved: int | None = None
    excess: str = ""

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes by worker."""
        return {name: outcome.code for name, outcome in self.outcomes.items()}

    def check(self) -> Result:
        """Return this result if every worker succeeded; otherwise raise an error that names the one that failed."""
        if self.culprit is not None:
            outcome = self.outcomes[self.culprit]
            raise RemoteFailureError(
                f"worker '{outcome.worker}' ended with exit code {outcome.code}", why=outcome.err[-2000:] or None
            )
        if self.late:
            raise DeadlineError("the workers did not exit in time", where=", ".join(self.outcomes))
        return self


class Job:
    """The running workers. As a context manager it ends all of them at its exit.

    `leash` is the launcher's end of the pipe by which workers detect its end; each of the `readers` consumes the output
    of one worker; `pulses` are the pipes of their heartbeats: a frozen worker is reported to `notice`, and killed. If
    the `enforcer` finds a limit exceeded, all are killed.
    """

    def __init__(
        self,
        processes: Mapping[str, subprocess.Popen[bytes]],
        leash: int,
        readers: Mapping[str, Reader],
        *,
        pulses: Mapping[str, int] | None = None,
        silence: float = SILENCE_SECONDS,
        ending: float = ENDING_SECONDS,
        notice: Callable[[str], None] = lambda text: None,
        enforcer: LimitEnforcer | None = None,
    ) -> None:
        self._processes = dict(processes)
        self._leash: int | None = leash
        self._readers = dict(readers)
        self._ended_workers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._frozen: set[str] = set()
        self._limit = float("inf")
        self._notice = notice
        self._silence, self._ending = silence, ending
        self._ward = HeartbeatMonitor(pulses or {}, self.pids, self._kill_frozen, silence, ending)
        self._keeper, self._excess, self._stop_event = enforcer, "", threading.Event()
        if enforcer is not None:
            threading.Thread(target=self._enforce_limits, args=(enforcer,), name="nebula-limits", daemon=True).start()
        for name, process in processes.items():
            threading.Thread(target=self._watch, args=(name, process), name=f"nebula-watch-{name}", daemon=True).start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def has_stepped(self) -> bool:
        """Whether a worker has taken its first step."""
        return any(each.first_step_at is not None for each in self._ward.statuses.values())

    @property
    def changed_variables(self) -> list[str] | None:
        """The environment variables that workers changed before they imported TensorFlow; None until all have taken
        their first step.
        """
        statuses = self._ward.statuses.values()
        if any(each.first_step_at is None for each in statuses):
            return None
        return sorted({name for each in statuses for name in each.changed_variables})

    @property
    def _is_saving(self) -> bool:
        """Whether a worker that has not ended is saving."""
        return any(self._processes[name].poll() is None and each.saving for name, each in self._ward.statuses.items())

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to one worker, but not to its children."""
        self._processes[worker].send_signal(number)

    def request_exit(self, number: int, seconds: float) -> None:
        """Ask all workers to leave by a signal, with a deadline. Safe to call in a signal handler."""
        self._limit = min(self._limit, time.monotonic() + seconds)
        for worker in self._processes:
            self.signal(worker, number)
        self._ended_workers.put("")

    def kill_now(self) -> None:
        """Kill all without waiting. Safe to call in a signal handler."""
        self._signal(self._processes.values(), signal.SIGKILL)

    def _kill_frozen(self, worker: str) -> None:
        """Kill a worker whose heartbeat has stopped; it would not handle another signal."""
        if self._processes[worker].poll() is not None:
            return
        if self._ward.statuses[worker].ends:
            still = f"its process has not exited for {self._ending:g} s"
            self._notice(f"worker {worker} has ended, but {still}: killing it")
        else:
            self._notice(f"worker {worker} is frozen (no heartbeat for {self._silence:g} s): killing it")
            self._frozen.add(worker)
        self._signal([self._processes[worker]], signal.SIGKILL)

    def _enforce_limits(self, enforcer: LimitEnforcer) -> None:
        """Kill all workers and their descendants when they exceed a limit."""
        while not self._stop_event.wait(_LOOK_SECONDS):
            workers = [process.pid for process in self._processes.values() if process.poll() is None]
            excess = ""
            with contextlib.suppress(OSError):  # no file descriptor or no disk space left: the next check may succeed
                excess = enforcer.find_excess(workers) if workers else ""
            if excess:
                self._excess = excess
                self._notice(f"{excess}: killing them")
                started = [each for worker in workers for each in list_descendants(worker)]
                self.kill_now()
                kill_processes(started)
                return

    def wait(self, deadline: float, *, grace: float = GRACE_SECONDS, patience: float | None = None) -> Result:
        """Wait until all workers have ended, at most `deadline` seconds; then kill the rest.

        When one fails, the others have `grace` seconds to detect it, to report and to exit by themselves, or `patience`
        seconds if they are saving, and `grace` after that; when one leaves, they have `patience` seconds to leave with
        it.
        """
        self._limit = min(self._limit, time.monotonic() + deadline)
        order: list[str] = []
        over: float | None = None
        was_saving = False
        while len(order) < len(self._processes):
            name = self._await_next()
            if name is None and over is not None and self._is_saving and time.monotonic() < over + (patience or grace):
                self._limit, was_saving = time.monotonic() + _LOOK_SECONDS, True
                continue
            if name is None and was_saving:
                self._limit, was_saving = time.monotonic() + grace, False
                continue
            if name is None:
                break
            if name:
                order.append(name)
                seconds = {0: None, EXIT_TEMPFAIL: patience or grace}.get(self._exit_code(name), grace)
                if seconds is not None:
                    over = time.monotonic() if over is None else over
                    self._limit = min(self._limit, time.monotonic() + seconds)
        statuses = self._ward.statuses
        order += [name for name in self._processes if name not in order and statuses[name].code is not None]
        culprit = self._find_culprit(order)
        late = culprit is None and len(order) < len(self._processes)
        self.kill(gently=not late)
        read = {name: reader.close() for name, reader in self._readers.items()}
        outcomes = {name: Outcome(name, self._exit_code(name), *read[name], statuses[name]) for name in read}
        steps = [each.first_step_at for each in statuses.values() if each.first_step_at is not None]
        trained = max(0.0, (over or time.monotonic()) - min(steps)) if steps else None
        saved = max((each.saved for each in statuses.values() if each.saved is not None), default=None)
        if self._keeper is not None and any(each.code == -signal.SIGKILL for each in outcomes.values()):
            self._excess = self._excess or self._keeper.explain_kill()
        return Result(outcomes, culprit, late, frozenset(self._frozen), trained, saved, self._excess)

    def _await_next(self) -> str | None:
        """The next worker that has ended; "" to check the deadline again, None if it has passed."""
        left = self._limit - time.monotonic()
        try:
            return self._ended_workers.get(timeout=max(0.0, min(left, 3600.0)))
        except queue.Empty:
            return "" if left > 3600.0 else None

    def _find_culprit(self, order: Iterable[str]) -> str | None:
        """The worker that failed first; one that merely left only if none failed."""
        bad = [name for name in order if self._exit_code(name) != 0]
        failed = [name for name in bad if self._exit_code(name) != EXIT_TEMPFAIL]
        return next(iter(failed or bad), None)

    def _exit_code(self, name: str) -> int:
        """The exit code of a worker; the one that it announced, if it was killed afterwards."""
        code = self._processes[name].returncode
        code = -signal.SIGKILL if code is None else code
        announced = self._ward.statuses[name].code if code in _LAUNCHER_SIGNALS else None
        return code if announced is None else announced

    def kill(self, *, gently: bool = False) -> None:
        """Kill all running workers and their descendants: with SIGKILL, if `gently` after SIGTERM."""
        if gently:
            self._signal(self._processes.values(), signal.SIGTERM)
            self._await_all(_TERM_SECONDS)
        self._signal(self._processes.values(), signal.SIGKILL)
        self._await_all(_KILLED_SECONDS)
        self._stop_event.set()
        self._ward.close()
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None

    def _signal(self, processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
        for process in processes:
            if process.poll() is None:
                signal_group(process.pid, number)

    def _await_all(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Kill a worker's descendants when it ends."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if process.returncode is None:
            end_group(process.pid)
        process.wait()
        self._ended_workers.put(name)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for reader in self._readers.values():
            reader.close()


LINGER_SECONDS = 1.0


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def list_group_members(group: int) -> list[int]:
    """The processes of a group that are alive.

    >>> os.getpid() in list_group_members(os.getpgrp())
    True
    """
    return [process for process, _, found in list_alive() if found == group]


def list_alive() -> Iterator[tuple[int, int, int]]:
    """Each process that is alive, its parent and its group."""
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent, group = read_stat(each)[:3]
                if state not in "ZX":
                    yield int(each.name), int(parent), int(group)


def list_descendants(process: int) -> list[int]:
    """All descendants of a process, in any group or session.

    >>> os.getpid() in list_descendants(os.getppid())
    True
    """
    children: dict[int, list[int]] = {}
    for each, parent, _ in list_alive():
        children.setdefault(parent, []).append(each)
    found = list(children.get(process, ()))
    for one in found:  # grows during iteration
        found += children.get(one, ())
    return found


def end_descendants(process: int) -> None:
    """Kill all descendants of a process, also those in another session. A daemon whose parent has
    ended is not found.
    """
    limit = time.monotonic() + LINGER_SECONDS
    while (found := list_descendants(process)) and time.monotonic() < limit:
        kill_processes(found)
        time.sleep(0.01)  # they may have started others meanwhile


def kill_processes(processes: Iterable[int]) -> None:
    """Kill processes that still exist."""
    for one in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def end_group(group: int, linger: float = LINGER_SECONDS) -> None:
    """End the rest of a process group: by SIGTERM, then by SIGKILL.

    Its leader must be a zombie, ended but not yet reaped: until then the group's number is not reused.
    """
    if not list_group_members(group):
        return
    signal_group(group, signal.SIGTERM)
    limit = time.monotonic() + linger
    while list_group_members(group) and time.monotonic() < limit:
        time.sleep(0.02)
    signal_group(group, signal.SIGKILL)
