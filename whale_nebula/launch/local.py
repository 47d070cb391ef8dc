"""All workers of a run on this machine: one process each, a connected socket between every two of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from whale_nebula.errors import ConfigError, DeadlineError, RemoteFailureError
from whale_nebula.launch.identity import VARIABLE, Identity, Peer
from whale_nebula.launch.output import Output

GRACE_SECONDS = 5.0
_TERM_SECONDS = 1.0
_KILLED_SECONDS = 10.0

Echo = Callable[[str, str, str], None]  # worker, "out" or "err", line


@dataclass(frozen=True)
class Outcome:
    """How one worker ended: its exit code (negative: the signal that ended it) and what it wrote."""

    worker: str
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Result:
    """How a job ended. `culprit` is the worker that failed first, `late` says that the deadline passed."""

    outcomes: Mapping[str, Outcome]
    culprit: str | None
    late: bool

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes by worker."""
        return {name: outcome.code for name, outcome in self.outcomes.items()}

    def check(self) -> Result:
        """Give this result if every worker ended well; otherwise raise the error that says which did not."""
        if self.culprit is not None:
            outcome = self.outcomes[self.culprit]
            raise RemoteFailureError(
                f"worker '{outcome.worker}' ended with exit code {outcome.code}",
                why=outcome.err[-2000:] or None,
            )
        if self.late:
            raise DeadlineError("the workers did not end in time", where=", ".join(self.outcomes))
        return self


class Job:
    """The running workers. As a context manager it leaves none behind."""

    def __init__(
        self, processes: Mapping[str, subprocess.Popen[bytes]], leash: int, echo: Echo | None
    ) -> None:
        self._processes = dict(processes)
        self._leash: int | None = leash
        self._outputs = {name: Output(name, process, echo) for name, process in processes.items()}
        self._ended: queue.Queue[str] = queue.Queue()
        for name, process in processes.items():
            threading.Thread(
                target=self._watch, args=(name, process), name=f"nebula-watch-{name}", daemon=True
            ).start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker."""
        return {name: process.pid for name, process in self._processes.items()}

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to one worker (and not to what it started)."""
        self._processes[worker].send_signal(number)

    def wait(self, deadline: float, *, grace: float = GRACE_SECONDS) -> Result:
        """Wait until all workers have ended, at most `deadline` seconds; then whoever still runs is killed.

        When one fails, the others have `grace` seconds to notice, to report and to end by themselves.
        """
        limit, culprit = time.monotonic() + deadline, None
        running = set(self._processes)
        late = False
        while running:
            try:
                name = self._ended.get(timeout=max(0.0, min(limit - time.monotonic(), 3600.0)))
            except queue.Empty:
                if time.monotonic() < limit:
                    continue
                late = culprit is None
                break
            running.discard(name)
            if culprit is None and self._processes[name].returncode != 0:
                culprit, limit = name, min(limit, time.monotonic() + grace)
        self.kill(gently=not late)
        return Result({name: self._outcome(name) for name in self._processes}, culprit, late)

    def kill(self, *, gently: bool = False) -> None:
        """End every worker that still runs, and what it started: with SIGKILL, if `gently` after SIGTERM."""
        if gently:
            self._signal_all(signal.SIGTERM)
            self._await_all(_TERM_SECONDS)
        self._signal_all(signal.SIGKILL)
        self._await_all(_KILLED_SECONDS)
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None

    def _signal_all(self, number: int) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, number)

    def _await_all(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ended.put(name)

    def _outcome(self, name: str) -> Outcome:
        process, output = self._processes[name], self._outputs[name]
        out, err = output.close()
        return Outcome(
            name, process.returncode if process.returncode is not None else -signal.SIGKILL, out, err
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for output in self._outputs.values():
            output.close()


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
        with _connected(workers) as ends:
            for worker, cluster in workers.items():
                peers = {name: Peer(workers[name], end.fileno()) for name, end in ends[worker].items()}
                identity = Identity(worker, cluster, peers, run_id, seed, leash, os.getpid())
                processes[worker] = _start(argv, identity, env, cwd)
        return Job(processes, hold, echo)
    except BaseException:
        os.close(hold)
        _abandon(processes)
        raise
    finally:
        os.close(leash)


def _start(
    argv: Sequence[str], identity: Identity, env: Mapping[str, str] | None, cwd: str | Path | None
) -> subprocess.Popen[bytes]:
    """A new process, no fork of this one's memory, in a group of its own, so that it can be killed whole."""
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, **(env or {}), VARIABLE: identity.to_json()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[identity.leash, *(peer.fd for peer in identity.peers.values())],
        process_group=0,
    )


@contextlib.contextmanager
def _connected(workers: Mapping[str, str]) -> Iterator[dict[str, dict[str, socket.socket]]]:
    """A socket pair between every two workers (worker -> peer -> end), closed here once all have theirs."""
    ends: dict[str, dict[str, socket.socket]] = {worker: {} for worker in workers}
    with contextlib.ExitStack() as stack:
        for one, other in itertools.combinations(workers, 2):
            ends[one][other], ends[other][one] = (stack.enter_context(end) for end in socket.socketpair())
        yield ends


def _abandon(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Some process could not be started: take the others back."""
    for process in processes.values():
        process.kill()
        process.communicate()
