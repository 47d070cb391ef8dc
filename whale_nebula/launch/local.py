"""All workers of a run on this machine: one process each, a connected socket between every two of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from whale_nebula.errors import ConfigError
from whale_nebula.launch.identity import Identity, Peer
from whale_nebula.launch.job import Job, Outcome, Result
from whale_nebula.launch.output import Echo, Output
from whale_nebula.launch.starting import abandon, start

__all__ = ["Echo", "Job", "Outcome", "Result", "spawn"]


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
                processes[worker] = start(argv, identity, env, cwd)
        return Job(processes, hold, {name: Output(name, process, echo) for name, process in processes.items()})
    except BaseException:
        os.close(hold)
        abandon(processes)
        raise
    finally:
        os.close(leash)


@contextlib.contextmanager
def _connected(workers: Mapping[str, str]) -> Iterator[dict[str, dict[str, socket.socket]]]:
    """A socket pair between every two workers (worker -> peer -> end), closed here once all have theirs."""
    ends: dict[str, dict[str, socket.socket]] = {worker: {} for worker in workers}
    with contextlib.ExitStack() as stack:
        for one, other in itertools.combinations(workers, 2):
            ends[one][other], ends[other][one] = (stack.enter_context(end) for end in socket.socketpair())
        yield ends
