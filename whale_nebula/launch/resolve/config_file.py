"""The first resolver: a config that lists the workers of this cluster."""

from __future__ import annotations

from collections.abc import Mapping

from whale_nebula.config import Cluster, Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.placement import (
    Asked,
    Declined,
    Placement,
    host_of,
    one_worker,
    own_cluster,
    with_others,
)


def from_config(config: Config, environ: Mapping[str, str], asked: Asked) -> Placement | Declined:
    """Start the worker that is asked for; unless one is, those of the cluster whose addresses are this host's.

    >>> from whale_nebula.config import load
    >>> config = load({"clusters": {"gpu": {"workers": ["a:7101"]}, "npu": {"workers": ["b:7101"]}}})
    >>> from_config(config, {}, Asked(cluster="npu"))
    Placement(here=('npu/0',), addresses={'gpu/0': 'a:7101', 'npu/0': 'b:7101'})
    """
    if not any(cluster.workers for cluster in config.clusters.values()):
        return Declined("there is no config that lists workers" if config.clusters else "there is no config")
    name = own_cluster(config, asked)
    cluster = config.clusters[name]
    if not cluster.workers:
        return Declined(f"the config lists no workers of {name!r}")
    own = {f"{name}/{number}": worker.address for number, worker in enumerate(cluster.workers)}
    here = tuple(f"{name}/{number}" for number in _here(cluster, asked))
    return Placement(here, with_others(config, name, own))


def _here(cluster: Cluster, asked: Asked) -> list[int]:
    count = len(cluster.workers)
    if asked.worker is not None or count == 1:
        return [one_worker(cluster.name, asked, count, 0)]
    found = [number for number, worker in enumerate(cluster.workers) if asked.local(host_of(worker.address))]
    if not found:
        raise ConfigError(
            f"which worker of {cluster.name!r} is on this host?",
            why=f"none of {', '.join(worker.address for worker in cluster.workers)} is an address of it",
            mend=f"--worker 0 ... --worker {count - 1}",
        )
    return found
