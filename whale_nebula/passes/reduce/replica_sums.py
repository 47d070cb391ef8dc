"""Sums over all replicas: what a micro-batch adds is its own part, what it gets is the whole's."""

from __future__ import annotations

from whale_nebula.ir.graph import REPLICA_SUM
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import COUNT, SUM, whole


@rule(REPLICA_SUM, literal=True)
def over_replicas(site: Site) -> Result:
    """A sum or a count over the batch becomes the same in every micro-batch. Nothing else would be the whole's then."""
    part = site.folds[0]
    if part.kind in (SUM, COUNT):
        return whole()
    return site.coupled(f"replicas would add up {part.spoken}, and not parts of a sum over the batch")
