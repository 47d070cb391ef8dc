"""Heartbeats from a worker to its launcher, which detects a frozen process within seconds, and status messages.

A worker's thread writes a byte each second into a pipe. A launcher that receives none for a while examines the process:
one that computes, or waits for a core, is busy and not frozen. Before its threads end, a worker sends its last message,
with its exit code: a process without heartbeats after that is ending, not frozen. Over the same pipe it sends the epoch
that it has joined, its first step, the last saved step, and the error by which it ends: the launcher uses them to
restart workers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

EVERY_SECONDS = 1.0
SILENCE_SECONDS = 5.0
ENDING_SECONDS = 15.0
"""How long a process may be silent after its last message, while libraries release resources, which may block."""
STOPPED = "T"
RUNNABLE = "R"
_BEAT, _END = b".", b"\n"


# ---------------------------------------------------------------------- the worker's side
class HeartbeatSender:
    """Thread that writes a heartbeat into a pipe until the reader closes it.

    `code` is the exit code of this process, once it is known, `error` the code of the error by which it ends, if it is
    one of this library's, `cause` that of the error of another worker that caused it, and `lost` the workers that
    were missed: the last message, sent by `announce_exit`, contains all of them.
    """

    def __init__(self, fd: int, every: float = EVERY_SECONDS) -> None:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        self.code: int | None = None
        self.error = self.cause = ""
        self.lost: list[str] = []
        self._fd, self._every, self._owner = fd, every, os.getpid()
        self.thread = threading.Thread(target=self._send_heartbeats, name="nebula-heartbeats", daemon=True)
        self.thread.start()

    def send(self, **fields: Any) -> None:
        """Send the launcher fields of `WorkerStatus`; `stepped=True` sets `first_step_at`. A forked process sends
        nothing.
        """
        if os.getpid() == self._owner:
            with suppress(OSError):
                os.write(self._fd, encode_status(**fields))

    def announce_exit(self) -> None:
        """Send the last message: this process, whose threads are about to end, is ending. To be called by the last of
        Python's exit handlers.
        """
        self.send(ends=True, code=self.code, error=self.error, cause=self.cause, lost=self.lost)

    def _send_heartbeats(self) -> None:
        with suppress(BrokenPipeError):
            while True:
                with suppress(BlockingIOError):  # a stopped launcher reads nothing, and the pipe is full
                    os.write(self._fd, _BEAT)
                time.sleep(self._every)


@dataclass(slots=True)
class WorkerStatus:
    """Status that a worker has sent: its exit code and error if it is ending, the error code of another worker that
    caused it, the workers that it has `lost`; the epoch that it has joined; when (by the launcher's clock) its first
    step ended, and the environment variables that the script had changed before it imported TensorFlow; the newest
    saved step; whether it is `saving` after an error; the requested numbers of workers
    by cluster, and 0 or 1 by worker, if they change; the absent workers whose state it needs; and the clusters that
    were lost since the start and have `missed` meetings since.
    """

    ends: bool = False
    code: int | None = None
    error: str = ""
    cause: str = ""
    lost: list[str] = field(default_factory=list)
    epoch: int | None = None
    first_step_at: float | None = None
    changed_variables: list[str] = field(default_factory=list)
    saved: int | None = None
    saving: bool = False
    counts: dict[str, int] | None = None
    needs: list[str] | None = None
    missed: list[str] | None = None


def encode_status(**fields: Any) -> bytes:
    r"""Encode a status message as a line of JSON.

    >>> encode_status(ends=True, code=1)
    b'{"ends":true,"code":1}\n'
    """
    return json.dumps(fields, separators=(",", ":")).encode() + _END


def parse_status(received: bytes, status: WorkerStatus, now: float) -> bytes:
    r"""Parse complete status messages into `status`; returns the incomplete rest.

    >>> status = WorkerStatus()
    >>> parse_status(b'..{"epoch":2}\n.{"stepped":true}\n..{"ends":tr', status, now=7.0)
    b'..{"ends":tr'
    >>> status.ends, status.epoch, status.first_step_at
    (False, 2, 7.0)
    """
    *lines, rest = received.split(_END)
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError):  # not a message of our workers
            fields = json.loads(line.lstrip(_BEAT))
            if fields.pop("stepped", False):
                status.first_step_at = now
            for name in fields.keys() & WorkerStatus.__slots__:
                setattr(status, name, fields[name])
    return rest


# ---------------------------------------------------------------------- the rule
class ProcessState(NamedTuple):
    """A process as the kernel sees it: its state, and its CPU time in ticks."""

    state: str
    cpu: int


class HeartbeatState(NamedTuple):
    """State of a worker's heartbeat: for how long it has been silent, and the CPU time at the last beat."""

    silent: float
    cpu: int


def update_heartbeat(
    before: HeartbeatState | None, passed: float, beat: bool, now: ProcessState
) -> HeartbeatState | None:
    """Update the heartbeat's state after an interval; None before the first beat.

    An increase of CPU time counts as a beat, unless the process is stopped.

    >>> heartbeat = update_heartbeat(None, 0.5, True, ProcessState("S", 10))
    >>> [update_heartbeat(heartbeat, 0.5, False, ProcessState("S", cpu)) for cpu in (10, 12)]
    [HeartbeatState(silent=0.5, cpu=10), HeartbeatState(silent=0.0, cpu=12)]
    """
    if beat:
        return HeartbeatState(0.0, now.cpu)
    if before is None:
        return None
    if now.cpu != before.cpu and now.state != STOPPED:
        return HeartbeatState(0.0, now.cpu)
    return HeartbeatState(before.silent + passed, now.cpu)


def is_frozen(
    heartbeat: HeartbeatState | None, has_runnable_thread: Callable[[], bool], silence: float = SILENCE_SECONDS
) -> bool:
    """Whether a worker is frozen: silent for too long, without a thread that is runnable.

    >>> is_frozen(HeartbeatState(6.0, 10), lambda: False), is_frozen(HeartbeatState(6.0, 10), lambda: True)
    (True, False)
    """
    return heartbeat is not None and heartbeat.silent >= silence and not has_runnable_thread()


# ---------------------------------------------------------------------- the launcher's side
def read_process_state(pid: int) -> ProcessState | None:
    """Read a process's state; None if it has ended."""
    with suppress(OSError):
        parts = read_stat(Path(f"/proc/{pid}"))
        return ProcessState(parts[0], int(parts[11]) + int(parts[12]))
    return None


def has_runnable_thread(pid: int) -> bool:
    """Whether a thread of a process is running or runnable."""
    states = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                states.append(read_stat(task)[0])
    return RUNNABLE in states


def read_stat(process: Path) -> list[str]:
    """Fields of a process or thread in /proc after its name, which may contain anything: state, parent, group ..."""
    return (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()


class HeartbeatMonitor:
    """Thread that monitors all workers' heartbeats, and calls `report` once for each frozen worker.

    `heartbeat_pipes` are the ends of the pipes to read from, which `close` closes; `pids` are the process ids. A worker
    may be silent for `silence` seconds, and for `ending` seconds after its last message. `statuses` has what each has
    sent.
    """

    def __init__(
        self,
        heartbeat_pipes: Mapping[str, int],
        pids: Mapping[str, int],
        report: Callable[[str], None],
        silence: float = SILENCE_SECONDS,
        ending: float = ENDING_SECONDS,
    ) -> None:
        self.statuses = {worker: WorkerStatus() for worker in pids}
        self._rest = dict.fromkeys(heartbeat_pipes, b"")
        self._heartbeat_pipes = dict(heartbeat_pipes)
        for fd in heartbeat_pipes.values():
            os.set_blocking(fd, False)
        self._pids = dict(pids)
        self._report = report
        self._silence, self._ending = silence, max(silence, ending)
        self._heartbeats: dict[str, HeartbeatState | None] = dict.fromkeys(heartbeat_pipes)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._monitor_workers, name="nebula-heartbeat-monitor", daemon=True)
        if heartbeat_pipes:
            self._thread.start()

    def close(self) -> None:
        """End monitoring after all pending messages were read."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for worker in self._heartbeat_pipes:
            self._read(worker)
        for fd in self._heartbeat_pipes.values():
            os.close(fd)
        self._heartbeat_pipes.clear()

    def _monitor_workers(self) -> None:
        tick = self._silence / 20
        last, watched = time.monotonic(), set(self._heartbeat_pipes)
        while not self._closed.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick), now  # time in which this process was frozen is not counted
            for worker in sorted(watched):
                if self._check_worker(worker, passed):
                    watched.discard(worker)
                    self._report(worker)

    def _check_worker(self, worker: str, passed: float) -> bool:
        pid = self._pids[worker]
        now = read_process_state(pid)
        if now is None:
            return False
        beat = self._read(worker)
        self._heartbeats[worker] = heartbeat = update_heartbeat(self._heartbeats[worker], passed, beat, now)
        return is_frozen(
            heartbeat, partial(has_runnable_thread, pid), self._ending if self.statuses[worker].ends else self._silence
        )

    def _read(self, worker: str) -> bool:
        """Read from a worker's pipe; returns whether anything was received. An end of file does not count."""
        received = b""
        with suppress(BlockingIOError):
            while some := os.read(self._heartbeat_pipes[worker], 4096):
                received += some
        self._rest[worker] = parse_status(self._rest[worker] + received, self.statuses[worker], time.monotonic())
        return bool(received)
