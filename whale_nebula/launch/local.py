"""All workers of a run on this machine: one process each, a connected socket between every two of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from whale_nebula.errors import ConfigError
from whale_nebula.launch.identity import VARIABLE, Identity, Peer
from whale_nebula.launch.job import Job, Outcome, Result

__all__ = ["Echo", "Job", "Outcome", "Result", "spawn"]


_REST_SECONDS = 2.0

Echo = Callable[[str, str, str], None]  # worker, "out" or "err", line


class Output:
    """Two threads that read a process's standard output and standard error until they end."""

    def __init__(self, worker: str, process: subprocess.Popen[bytes], echo: Echo | None) -> None:
        self._worker = worker
        self._echo = echo
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        streams = {"out": process.stdout, "err": process.stderr}
        self._threads = [
            threading.Thread(target=self._pump, args=(name, stream), name=f"nebula-{name}-{worker}", daemon=True)
            for name, stream in streams.items()
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> tuple[str, str]:
        """Standard output and standard error. The process has ended; a stream that something it started still
        holds open is waited for only briefly.
        """
        for thread in self._threads:
            thread.join(_REST_SECONDS)
        return "".join(self._lines["out"]), "".join(self._lines["err"])

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._lines[name].append(text)
                if self._echo is not None:
                    self._echo(self._worker, name, text)


def start(
    argv: Sequence[str], identity: Identity, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> subprocess.Popen[bytes]:
    """A new process, no fork of this one's memory, in a group of its own, so that it can be killed whole."""
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, **(env or {}), VARIABLE: identity.to_json()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=identity.descriptors,
        process_group=0,
    )


def abandon(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Some process could not be started: take the others back."""
    for process in processes.values():
        process.kill()
        process.communicate()


def spawn(
    argv: Sequence[str],
    workers: Mapping[str, str],
    *,
    run_id: str | None = None,
    seed: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    echo: Echo | None = None,
) -> Job:
    r"""Start one process per worker of the same script; `workers` gives the cluster of each by its name.

    `argv` is what follows `python` on a command line: a script and its arguments, or `-c` and code. Each
    process finds out by `attach()` who it is. `env` is added to this process's environment. `echo` gets
    every line of output as it comes.

    >>> with spawn(["-c", "print('hello')"], {"gpu/0": "gpu", "npu/0": "npu"}) as job:
    ...     result = job.wait(deadline=60)
    >>> result.outcomes["npu/0"].out
    'hello\n'
    """
    if not workers:
        raise ConfigError("a job needs at least one worker", mend='workers={"gpu/0": "gpu", "npu/0": "npu"}')
    run_id = run_id or secrets.token_hex(8)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    leash, hold = os.pipe()
    try:
        with _connect_workers(workers) as ends:
            for worker, cluster in workers.items():
                peers = {name: Peer(workers[name], end.fileno()) for name, end in ends[worker].items()}
                identity = Identity(worker, cluster, peers, run_id, seed, leash, os.getpid())
                processes[worker] = start(argv, identity, env, cwd)
        return Job(processes, hold, {name: Output(name, process, echo) for name, process in processes.items()})
    except BaseException:
        os.close(hold)
        abandon(processes)
        raise
    finally:
        os.close(leash)


@contextlib.contextmanager
def _connect_workers(workers: Mapping[str, str]) -> Iterator[dict[str, dict[str, socket.socket]]]:
    """A socket pair between every two workers (worker -> peer -> end), closed here once all have theirs."""
    ends: dict[str, dict[str, socket.socket]] = {worker: {} for worker in workers}
    with contextlib.ExitStack() as stack:
        for one, other in itertools.combinations(workers, 2):
            ends[one][other], ends[other][one] = (stack.enter_context(end) for end in socket.socketpair())
        yield ends
