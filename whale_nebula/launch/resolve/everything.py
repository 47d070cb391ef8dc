"""`--all`: every worker of every cluster on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whale_nebula.config import Cluster, Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.placement import ANY, Placement, host_of


def everything(config: Config, clusters: Sequence[str], local: Callable[[str], bool]) -> Placement:
    """All workers of the config's clusters, or one of each cluster that is named.

    An address that is not this machine's becomes one of it, at a port that is free.

    >>> everything(Config(), ["gpu", "npu"], lambda host: False).addresses
    {'gpu/0': '127.0.0.1:0', 'npu/0': '127.0.0.1:0'}
    """
    known = config.clusters or {name: Cluster(name) for name in clusters}
    if not known:
        raise ConfigError(
            "which clusters are there?",
            why="a script's scopes name them, but only when it runs",
            mend="--all --clusters gpu,npu, or --all --config clusters.yaml",
        )
    addresses: dict[str, str] = {}
    for cluster in known.values():
        given = [worker.address for worker in cluster.workers] or [ANY]
        addresses |= {
            f"{cluster.name}/{number}": each if local(host_of(each)) else ANY for number, each in enumerate(given)
        }
    return Placement(tuple(addresses), addresses)
