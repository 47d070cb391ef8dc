"""Who knows where the workers are? Resolvers are asked in order; the first that knows answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from whale_nebula.config import Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.config_file import from_config
from whale_nebula.launch.resolve.jobset import from_jobset
from whale_nebula.launch.resolve.localhost import from_localhost
from whale_nebula.launch.resolve.placement import Asked, Declined, Placement, Resolver
from whale_nebula.launch.resolve.slurm import from_slurm
from whale_nebula.launch.resolve.tf_config import from_tf_config

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

    def explained(self) -> str:
        """The same in lines.

        >>> print(resolve(Config(), {}, Asked()).explained())
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
