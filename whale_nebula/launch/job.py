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

    `launcher_pipe` is the launcher's end of the pipe by which workers detect its end; each of the `readers` consumes
    the output of one worker; `heartbeat_pipes` are the pipes of their heartbeats: a frozen worker is reported to
    `notice`, and killed. If the `enforcer` finds a limit exceeded, all are killed.
    """

    def __init__(
        self,
        processes: Mapping[str, subprocess.Popen[bytes]],
        launcher_pipe: int,
        readers: Mapping[str, Reader],
        *,
        heartbeat_pipes: Mapping[str, int] | None = None,
        silence: float = SILENCE_SECONDS,
        ending: float = ENDING_SECONDS,
        notice: Callable[[str], None] = lambda text: None,
        enforcer: LimitEnforcer | None = None,
    ) -> None:
        self._processes = dict(processes)
        self._launcher_pipe: int | None = launcher_pipe
        self._readers = dict(readers)
        self._ended_workers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._frozen: set[str] = set()
        self._limit = float("inf")
        self._notice = notice
        self._silence, self._ending = silence, ending
        self._monitor = HeartbeatMonitor(heartbeat_pipes or {}, self.pids, self._kill_frozen, silence, ending)
        self._enforcer, self._excess, self._stop_event = enforcer, "", threading.Event()
        if enforcer is not None:
            threading.Thread(target=self._enforce_limits, args=(enforcer,), name="nebula-limits", daemon=True).start()
        self._watchers = [
            threading.Thread(target=self._watch, args=each, name=f"nebula-watch-{each[0]}", daemon=True)
            for each in processes.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def has_stepped(self) -> bool:
        """Whether a worker has taken its first step."""
        return any(each.first_step_at is not None for each in self._monitor.statuses.values())

    @property
    def changed_variables(self) -> list[str] | None:
        """The environment variables that workers changed before they imported TensorFlow; None until all have taken
        their first step.
        """
        statuses = self._monitor.statuses.values()
        if any(each.first_step_at is None for each in statuses):
            return None
        return sorted({name for each in statuses for name in each.changed_variables})

    @property
    def _is_saving(self) -> bool:
        """Whether a worker that has not ended is saving."""
        statuses = self._monitor.statuses.items()
        return any(each.saving and is_running(self._processes[name]) for name, each in statuses)

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to one worker, but not to its children."""
        process = self._processes[worker]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def request_exit(self, number: int, seconds: float) -> None:
        """Ask all workers to leave by a signal, with a deadline. Safe to call in a signal handler."""
        self._limit = min(self._limit, time.monotonic() + seconds)
        for worker in self._processes:
            self.signal(worker, number)
        self._ended_workers.put("")

    def kill_now(self) -> None:
        """Kill all workers and their process groups without waiting. Safe to call in a signal handler."""
        self._signal(signal.SIGKILL)

    def _kill_frozen(self, worker: str) -> None:
        """Kill a worker whose heartbeat has stopped; it would not handle another signal."""
        if not is_running(self._processes[worker]):
            return
        if self._monitor.statuses[worker].ends:
            still = f"its process has not exited for {self._ending:g} s"
            self._notice(f"worker {worker} has ended, but {still}: killing it")
        else:
            self._notice(f"worker {worker} is frozen (no heartbeat for {self._silence:g} s): killing it")
            self._frozen.add(worker)
        signal_group(self._processes[worker].pid, signal.SIGKILL)

    def _enforce_limits(self, enforcer: LimitEnforcer) -> None:
        """Kill all workers and their descendants when they exceed a limit."""
        while not self._stop_event.wait(_LOOK_SECONDS):
            workers = self._list_running()
            excess = ""
            with contextlib.suppress(OSError):  # no file descriptor or no disk space left: the next check may succeed
                excess = enforcer.find_excess(workers) if workers else ""
            if excess:
                self._excess = excess
                self._notice(f"{excess}: killing them")
                self._kill_with_descendants()
                return

    def _list_running(self) -> list[int]:
        """The process ids of the workers that have not ended."""
        return [process.pid for process in self._processes.values() if is_running(process)]

    def _kill_with_descendants(self) -> None:
        """Kill the workers that have not ended, their process groups, and all their descendants in other groups and
        sessions.
        """
        descendants = [each for worker in self._list_running() for each in list_descendants(worker)]
        self.kill_now()
        kill_processes(descendants)

    def wait(self, deadline: float, *, grace: float = GRACE_SECONDS, patience: float | None = None) -> Result:
        """Wait until all workers have ended, at most `deadline` seconds; then kill the rest.

        When one fails, the others have `grace` seconds to detect it, to report and to exit by themselves, or `patience`
        seconds if they are saving, and `grace` after that; when one leaves, they have `patience` seconds to leave with
        it.
        """
        self._limit = min(self._limit, time.monotonic() + deadline)
        order: list[str] = []
        failed_at: float | None = None
        was_saving = False
        while len(order) < len(self._processes):
            name = self._await_next()
            may_save = failed_at is not None and time.monotonic() < failed_at + (patience or grace)
            if name is None and may_save and self._is_saving:
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
                    failed_at = time.monotonic() if failed_at is None else failed_at
                    self._limit = min(self._limit, time.monotonic() + seconds)
        statuses = self._monitor.statuses
        order += [name for name in self._processes if name not in order and statuses[name].code is not None]
        culprit = self._find_culprit(order)
        late = culprit is None and len(order) < len(self._processes)
        self.kill(gently=not late)
        read = {name: reader.close() for name, reader in self._readers.items()}
        outcomes = {name: Outcome(name, self._exit_code(name), *read[name], statuses[name]) for name in read}
        steps = [each.first_step_at for each in statuses.values() if each.first_step_at is not None]
        trained = max(0.0, (failed_at or time.monotonic()) - min(steps)) if steps else None
        saved = max((each.saved for each in statuses.values() if each.saved is not None), default=None)
        if self._enforcer is not None and any(each.code == -signal.SIGKILL for each in outcomes.values()):
            self._excess = self._excess or self._enforcer.explain_kill()
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
        announced = self._monitor.statuses[name].code if code in _LAUNCHER_SIGNALS else None
        return code if announced is None else announced

    def kill(self, *, gently: bool = False) -> None:
        """Kill all running workers and their descendants: with SIGKILL, if `gently` after SIGTERM to their process
        groups. Returns once they have ended.
        """
        if gently:
            self._signal(signal.SIGTERM)
            self._await_all(_TERM_SECONDS)
        self._kill_with_descendants()
        self._await_all(_KILLED_SECONDS)
        self._stop_event.set()
        self._monitor.close()
        if self._launcher_pipe is not None:
            os.close(self._launcher_pipe)
            self._launcher_pipe = None

    def _signal(self, number: int) -> None:
        """Send a signal to the process groups of all workers that are not reaped."""
        for process in self._processes.values():
            if process.returncode is None:
                signal_group(process.pid, number)

    def _await_all(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for watcher in self._watchers:
            watcher.join(max(0.0, limit - time.monotonic()))

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a worker, end the rest of its process group, and reap it. Nothing else reaps it: the
        number of its group could then be that of other processes.
        """
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
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


def is_running(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child process has not ended. Unlike `poll`, this does not reap it."""
    with contextlib.suppress(ChildProcessError):
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return process.returncode is None and os.waitid(os.P_PID, process.pid, options) is None
    return False


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
