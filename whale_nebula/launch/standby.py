"""Standby processes of a launcher: one for each of its workers, started in advance. It imports what every worker needs,
and waits for its identity; with that it is the worker of the next start.

It is started with the worker's command and environment. Its identity and the descriptors that belong to it are sent
through a socket. When the launcher ends, the socket is closed, and the process exits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from whale_nebula.config.schema import cluster_of
from whale_nebula.launch import worker_processes
from whale_nebula.launch.attach import Identity
from whale_nebula.launch.job import Job

_LOOK_SECONDS = 0.25


class Command(NamedTuple):
    """The command line of a process after `python`, variables added to its environment, and its folder."""

    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    cwd: str | os.PathLike[str] | None = None

    def resolve(self) -> tuple[object, ...]:
        """The arguments, the whole environment and the folder with which a process would start now."""
        return tuple(self.argv), {**os.environ, **(self.env or {})}, os.fspath(self.cwd or os.getcwd())


class _Standby(NamedTuple):
    """A standby process, with the command by which it was started."""

    command: tuple[object, ...]
    process: subprocess.Popen[bytes]
    connection: socket.socket

    def send(self, identity: Identity) -> bool:
        """Send the identity with its descriptors; returns whether that succeeded."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError), self.connection:
                socket.send_fds(self.connection, [b"!"], identity.descriptors)
                self.connection.sendall(f"{identity.to_json()}\n".encode())
                return True
        return False

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.communicate()


class Standbys:
    """The standby processes for these workers. If the script permits none, `notice` is called with the reason."""

    def __init__(self, workers: Sequence[str], notice: Callable[[str], None]) -> None:
        self._workers, self._notice = tuple(workers), notice
        self._command: Command | None = None
        self._waiting: dict[str, _Standby] = {}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of those that wait, by worker."""
        return {worker: standby.process.pid for worker, standby in self._waiting.items()}

    def start(
        self,
        argv: Sequence[str],
        identity: Identity,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a worker: its standby process, if that has the same command, environment and folder, otherwise a new
        process.
        """
        self._command = Command(argv, env, cwd)
        standby = self._waiting.pop(identity.worker, None)
        if standby is not None:
            if standby.command == self._command.resolve() and standby.send(identity):
                return standby.process
            standby.end()
        return worker_processes.start(argv, identity, env, cwd)

    @contextlib.contextmanager
    def start_beside(self, job: Job) -> Iterator[None]:
        """Context in which missing standby processes are started, one after the other, once all workers of the job have
        made their first step.
        """
        if not self._workers:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._start_missing, args=(job, ended), name="nebula-standby", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _start_missing(self, job: Job, ended: threading.Event) -> None:
        while (names := job.changed_variables) is None:
            if ended.wait(_LOOK_SECONDS):
                return
        if names:
            self._notice(
                f"no standby processes: the script changes {', '.join(names)} before it imports TensorFlow; "
                "set it in the environment of whale-nebula run instead"
            )
            self._workers = ()
        for worker in self._workers:
            if worker not in self._waiting and self._command is not None and not ended.is_set():
                standby = self._waiting[worker] = self._start_standby(worker, self._command)
                while not ended.is_set():
                    with contextlib.suppress(TimeoutError):
                        standby.connection.recv(1)  # it is ready, or has ended
                        break

    def _start_standby(self, worker: str, command: Command) -> _Standby:
        ours, theirs = socket.socketpair()
        ours.settimeout(_LOOK_SECONDS)
        with theirs:
            identity = Identity(worker, cluster_of(worker), {}, launcher=os.getpid(), standby=theirs.fileno())
            process = worker_processes.start(command.argv, identity, command.env, command.cwd)
        return _Standby(command.resolve(), process, ours)

    def close(self) -> None:
        """End all standby processes."""
        for standby in self._waiting.values():
            standby.end()
        self._waiting.clear()
