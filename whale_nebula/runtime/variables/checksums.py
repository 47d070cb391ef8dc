"""Periodic checksums, by which processes verify that they hold the same variables.

Processes start with equal variables and make the same updates, so variables stay equal. Without checksums, a device
that computes differently, a callback that writes a weight in one process only, or a memory error would not be detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

from whale_nebula.errors import PlanMismatchError
from whale_nebula.ir.cut import Cut

EVERY = 100
"""The interval of comparisons, in steps. Each reads every variable that several processes hold."""

Sums = Mapping[str, int]
"""A checksum of the variables with the same holders, by the names of these workers."""


def is_due(steps: int) -> bool:
    """Whether checksums are compared after a step, by its number: the second, and every hundredth.

    >>> [step for step in range(202) if is_due(step)]
    [1, 101, 201]
    """
    return steps % EVERY == 1


def sums(
    cut: Cut, worker: str, variables: Mapping[str, Any], pieces: Mapping[str, Sequence[str]] | None = None
) -> Sums:
    """Checksums of the variables that a worker replicates with others of its cluster; for `pieces`,
    with these workers.
    """
    clusters = {each.name: each.cluster for each in cut.workers}
    found: dict[str, int] = {}
    for path in sorted(cut.held):
        holders = (pieces or {}).get(path, cut.held[path])
        mates = [other for other in holders if clusters[other] == clusters[worker]]
        if worker in mates and len(mates) > 1 and path in variables:
            together = ", ".join(sorted(mates))
            data = np.ascontiguousarray(variables[path].numpy())
            found[together] = google_crc32c.extend(found.get(together, 0), data.tobytes())
    return found


def check(worker: str, own: Sums, peer: str, theirs: Any, step: int) -> None:
    """Raise if another worker has other bits.

    >>> check("gpu/0", {"gpu/0, gpu/1": 1}, "gpu/1", {"gpu/0, gpu/1": 1}, 101)
    """
    said = theirs if isinstance(theirs, dict) else {}
    unlike = next((names for names in own if names in said and said[names] != own[names]), None)
    if unlike is not None:
        raise PlanMismatchError(
            f"the replicas in {unlike} no longer have the same variables: {worker} and {peer} differ at step {step}",
            where=peer,
            why="something wrote a variable in one process only, or computed it in another way",
            mend="write variables in every process alike, or in a step; then start all workers from a checkpoint",
        )
