"""Start all workers of a run on this machine from a script, over gRPC and mutual TLS, as `whale-nebula run --all`
does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.launch.gateways import for_one_run
from whale_nebula.launch.gateways import names as gateway_names
from whale_nebula.launch.gateways import running as running_gateways
from whale_nebula.launch.job import Job, Reader
from whale_nebula.launch.placed import Output, identities, start_placed
from whale_nebula.launch.processes import Echo
from whale_nebula.launch.processes import Output as Streams
from whale_nebula.launch.pulse import SILENCE_SECONDS
from whale_nebula.launch.resolve import Placement
from whale_nebula.launch.resolve.placement import ANY, settle_ports


@dataclass(frozen=True)
class _Kept(Output):
    """Output that is kept for the job's result, and echoed line by line."""

    echo: Echo | None = None

    def reader(self, worker: str, process: subprocess.Popen[bytes], picture: int | None) -> Reader:
        return Streams(worker, process, self.echo)


@contextlib.contextmanager
def spawn(
    argv: Sequence[str],
    workers: Mapping[str, str],
    *,
    run_id: str = "local",
    seed: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    echo: Echo | None = None,
    gateways: bool = False,
    silence: float = SILENCE_SECONDS,
) -> Iterator[Job]:
    r"""Start one process per worker of the same script; `workers` gives the cluster of each by its name.

    `argv` is what follows `python` on a command line: a script and its arguments, or `-c` and code. Each process finds
    out by `attach()` who it is. `env` is added to this process's environment. `echo` gets every line of output as it
    comes. With `gateways` each cluster has one, and clusters reach each other through them. A worker that is not heard
    of for `silence` seconds is taken for frozen. The certificates are made for this run alone.

    >>> with spawn(["-c", "print('hello')"], {"gpu/0": "gpu", "npu/0": "npu"}) as job:
    ...     result = job.wait(deadline=60)
    >>> result.outcomes["npu/0"].out
    'hello\n'
    """
    if not workers:
        raise ConfigError("a job needs at least one worker", mend='workers={"gpu/0": "gpu", "npu/0": "npu"}')
    placement = settle_ports(Placement(tuple(workers), dict.fromkeys(workers, ANY)))
    clusters: dict[str, dict[str, Any]] = {}
    for worker, cluster in workers.items():
        clusters.setdefault(cluster, {"workers": []})["workers"].append(placement.addresses[worker])
    if gateways:
        ports = settle_ports(Placement((), dict.fromkeys(clusters, ANY))).addresses
        clusters = {name: {**each, "gateway": ports[name]} for name, each in clusters.items()}
    config = load({"run": run_id, "clusters": clusters, **({} if seed is None else {"seed": seed})})
    with contextlib.ExitStack() as stack:
        security = stack.enter_context(for_one_run(config, [*workers, *gateway_names(config)]))
        if gateways:
            stack.enter_context(running_gateways(config, placement, security))
        told = identities(placement, config, security, everywhere=True)
        yield stack.enter_context(start_placed(argv, told, output=_Kept(echo=echo), silence=silence, env=env, cwd=cwd))
