"""Which workers of a cluster add up what the replicas of a stage have."""

from __future__ import annotations

from whale_nebula.ir.cut import Cut
from whale_nebula.runtime.collectives import Collectives, Group


def groups(cut: Cut, own: str, collectives: Collectives | None, name: str) -> dict[int, Group]:
    """By stage, the group of its replicas that this worker is in, each with a name of its own."""
    if collectives is None:
        return {}
    cluster = next(worker.cluster for worker in cut.workers if worker.name == own)
    tasks = sorted(worker.name for worker in cut.workers if worker.cluster == cluster)
    hosts = {stage: cut.routing.of(stage) for stage in sorted(cut.routing.replicated)}
    return {
        stage: collectives.group([tasks.index(host) for host in each], f"{name} stage {stage}")
        for stage, each in hosts.items()
        if own in each
    }
