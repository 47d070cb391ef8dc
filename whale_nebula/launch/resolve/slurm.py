"""The third resolver: inside a Slurm job, where `srun whale-nebula run ...` is one task for each worker."""

from __future__ import annotations

from collections.abc import Mapping

from whale_nebula.config import Config
from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.node_list import nodes, tasks
from whale_nebula.launch.resolve.placement import Asked, Declined, Placement, one_worker, own_cluster, with_others


def from_slurm(config: Config, environ: Mapping[str, str], asked: Asked) -> Placement | Declined:
    """The tasks of a step are the workers of this cluster, in their order.

    >>> environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> from_slurm(Config(), {**environ, "SLURM_PROCID": "1"}, Asked(cluster="gpu"))
    Placement(here=('gpu/1',), addresses={'gpu/0': 'n1:7101', 'gpu/1': 'n1:7102', 'gpu/2': 'n2:7101'})
    """
    if not environ.get("SLURM_JOB_ID"):
        return Declined("SLURM_JOB_ID is not set")
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return Declined("Slurm names no nodes: SLURM_JOB_NODELIST is not set")
    cluster = own_cluster(config, asked)
    addresses = [
        f"{node}:{asked.port + number}"
        for node, count in zip(*_layout(listed, environ), strict=True)
        for number in range(count)
    ]
    if "SLURM_STEP_NODELIST" not in environ and len(addresses) > 1 and asked.worker is None:
        raise ConfigError(
            f"this job has {len(addresses)} tasks, and this is none of them",
            why="a batch script runs on its first node only",
            mend="srun whale-nebula run ...",
        )
    own = {f"{cluster}/{number}": each for number, each in enumerate(addresses)}
    said = f"SLURM_PROCID={environ.get('SLURM_PROCID', '')}"
    number = one_worker(cluster, asked, len(own), _task(environ), said=said)
    return Placement((f"{cluster}/{number}",), with_others(config, cluster, own))


def _layout(listed: str, environ: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """The nodes, and how many tasks each has; one where nothing is said."""
    names = nodes(listed)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    counts = tasks(text) if text else [1] * len(names)
    if len(counts) != len(names):
        raise ConfigError(
            f"Slurm names {len(names)} nodes, and tasks for {len(counts)}",
            where=f"{listed}, {text}",
            mend="list the workers in the config: --config clusters.yaml --cluster gpu --worker 0",
        )
    return names, counts


def _task(environ: Mapping[str, str]) -> int | None:
    text = environ.get("SLURM_PROCID", "0")
    return int(text) if text.isdecimal() else None
