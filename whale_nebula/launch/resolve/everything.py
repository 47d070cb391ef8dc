"""`--all`: every worker of every cluster on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from whale_nebula.config import Cluster, Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.placement import ANY, Placement, host_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def everything(config: Config, clusters: Sequence[str], local: Callable[[str], bool]) -> Placement:
    """All workers of the config's clusters, or one of each cluster that is named.

    An address that is not this machine's becomes one of it, at a port that is free.

    >>> everything(Config(), ["gpu", "npu"], lambda host: False).addresses
    {'gpu/0': '127.0.0.1:0', 'npu/0': '127.0.0.1:0'}
    """
    _check(clusters)
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


def _check(clusters: Sequence[str]) -> None:
    """What stands in `--clusters` is names, each once."""
    for number, each in enumerate(clusters):
        if not _NAME.fullmatch(each):
            meant = re.sub(r"[^A-Za-z0-9._-]+", "-", each).strip("-._") or "gpu"
            raise ConfigError(
                f"{each!r} is no name of a cluster",
                where="--clusters",
                why="letters, digits, '.', '_' and '-', a letter or digit first",
                mend=f"--clusters {','.join([*clusters[:number], meant, *clusters[number + 1 :]])}",
            )
        if each in clusters[:number]:
            mend = f"--clusters {','.join(dict.fromkeys(clusters))}"
            raise ConfigError(f"cluster {each!r} is named twice", where="--clusters", mend=mend)
