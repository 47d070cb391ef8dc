"""Where the workers of a run are: a chain of resolvers, of which the first that recognises its environment answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from whale_nebula.config import Cluster, Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.environments import (
    from_config,
    from_jobset,
    from_localhost,
    from_slurm,
    from_tf_config,
)
from whale_nebula.launch.resolve.placement import ANY, PORT, Asked, Declined, Placement, Resolver, cluster_of, host_of

__all__ = [
    "ANY",
    "CHAIN",
    "PORT",
    "Asked",
    "Declined",
    "Placement",
    "Resolved",
    "cluster_of",
    "everything",
    "host_of",
    "resolve",
]

CHAIN: Mapping[str, Resolver] = {
    "config": from_config,
    "TF_CONFIG": from_tf_config,
    "Slurm": from_slurm,
    "Kubernetes JobSet": from_jobset,
    "localhost": from_localhost,
}


class Resolved(NamedTuple):
    """A placement, who knew it, and what those said who were asked before: name and reason."""

    placement: Placement
    source: str
    declined: Mapping[str, str]

    def explain(self) -> str:
        """The same in lines.

        >>> print(resolve(Config(), {}, Asked()).explain())
        config: no, there is no config
        TF_CONFIG: no, TF_CONFIG is not set
        Slurm: no, SLURM_JOB_ID is not set
        Kubernetes JobSet: no, JOBSET_NAME is not set
        localhost: yes, it says where the workers are
        """
        lines = [f"{name}: no, {why}" for name, why in self.declined.items()]
        return "\n".join([*lines, f"{self.source}: yes, it says where the workers are"])


def resolve(config: Config, environ: Mapping[str, str], asked: Asked) -> Resolved:
    """Ask all resolvers until one answers."""
    declined: dict[str, str] = {}
    for name, resolver in CHAIN.items():
        found = resolver(config, environ, asked)
        if not isinstance(found, Declined):
            return Resolved(found, name, declined)
        declined[name] = found.why
    raise ConfigError(
        "nothing says where the workers are",
        why="\n".join(f"{name}: {why}" for name, why in declined.items()),
        mend='clusters: {gpu: {workers: ["10.77.0.1:7101"]}, npu: {workers: ["10.77.0.2:7101"]}}',
    )


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def everything(config: Config, clusters: Sequence[str], local: Callable[[str], bool]) -> Placement:
    """All workers of the config's clusters, or one of each cluster that is named.

    An address that is not this machine's becomes one of it, at a port that is free.

    >>> everything(Config(), ["gpu", "npu"], lambda host: False).addresses
    {'gpu/0': '127.0.0.1:0', 'npu/0': '127.0.0.1:0'}
    """
    _check_names(clusters)
    known = config.clusters or {name: Cluster(name) for name in clusters}
    if not known:
        why = "a script's scopes name them, but only when it runs"
        mend = "--all --clusters gpu,npu, or --all --config clusters.yaml"
        raise ConfigError("which clusters are there?", why=why, mend=mend)
    addresses: dict[str, str] = {}
    for cluster in known.values():
        given = [worker.address for worker in cluster.workers] or [ANY]
        addresses |= {
            f"{cluster.name}/{number}": each if local(host_of(each)) else ANY for number, each in enumerate(given)
        }
    return Placement(tuple(addresses), addresses)


def _check_names(clusters: Sequence[str]) -> None:
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
