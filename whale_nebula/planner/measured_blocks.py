"""Seconds of a program's blocks as they were measured on one device, for each call and each row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whale_nebula.hardware.timing import fit_line
from whale_nebula.plain import to_plain
from whale_nebula.planner.problem import Array

KINDS = ("forward", "backward", "update", "fused")
"""What is measured of blocks; the last, forward and backward as one function, only of all together."""
Points = dict[int, float]
"""Seconds by the rows of the batch."""


@dataclass(frozen=True)
class MeasuredBlocks:
    """Two numbers for each block, what a call takes and what each row adds, and at the end for all blocks together; NaN
    where it was not measured. Of all together `fused` is forward and backward as one function. `adding` are seconds of
    adding two tensors for each byte of one, `call` those of a call that does nothing, on so many `cores`.

    >>> found = MeasuredBlocks.of({"forward": {1: {4: 6.0, 8: 10.0}}, "backward": {}, "update": {}}, 2)
    >>> found.forward.tolist(), MeasuredBlocks.from_plain(found.to_plain(), 2).forward[1, 1].item()
    ([[nan, 2.0, nan], [nan, 1.0, nan]], 1.0)
    """

    forward: Array
    backward: Array
    update: Array
    fused: Array
    adding: float = math.nan
    call: float = math.nan
    cores: int = 1

    @classmethod
    def of(
        cls,
        points: Mapping[str, Mapping[int, Points]],
        count: int,
        adding: float = math.nan,
        call: float = math.nan,
        cores: int = 1,
    ) -> MeasuredBlocks:
        """A line through the seconds of each block: `points` are by kind, block (-1 for all) and rows."""
        made = {kind: np.full((2, count + 1), np.nan) for kind in KINDS}
        for kind, blocks in points.items():
            for block, seconds in blocks.items():
                made[kind][:, block] = fit_line([(float(rows), max(each, 1e-9)) for rows, each in seconds.items()])
                if kind == "update":  # it has no rows
                    made[kind][:, block] = min(seconds.values()), 0.0
        return cls(**made, adding=adding, call=call, cores=cores)

    def has(self, way: int, block: int) -> bool:
        """Whether the forward (0) or the backward (1) of a block was measured."""
        return not np.isnan((self.forward, self.backward)[way][0, block])

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it, without blocks that were not measured."""
        return {"adding": to_plain(self.adding), "call": to_plain(self.call), "cores": self.cores} | {
            kind: {str(block): [float(each) for each in own[:, block]] for block in np.flatnonzero(~np.isnan(own[0]))}
            for kind, own in ((kind, getattr(self, kind)) for kind in KINDS)
        }

    @classmethod
    def from_plain(cls, plain: Any, count: int) -> MeasuredBlocks:
        """What `to_plain` made, or a peer says; what is no such thing is left out."""
        made = {kind: np.full((2, count + 1), np.nan) for kind in KINDS}
        for kind, own in made.items():
            given = plain.get(kind) if isinstance(plain, dict) else None
            for block, pair in (given if isinstance(given, dict) else {}).items():
                if block.isdecimal() and int(block) <= count and len(pair) == 2:
                    own[:, int(block)] = pair
        others = plain if isinstance(plain, dict) else {}
        adding, call = (each if isinstance(each, float) else math.nan for each in map(others.get, ("adding", "call")))
        cores = others.get("cores")
        return cls(**made, adding=adding, call=call, cores=max(cores, 1) if isinstance(cores, int) else 1)


def slowest_of(every: Sequence[MeasuredBlocks], rows: int) -> MeasuredBlocks | None:
    """Of the devices of a cluster the one that takes longest; None where none has measured."""
    known = [each for each in every if not np.isnan(each.forward[0]).all()]
    return max(known, key=lambda each: _total(each, rows), default=None)


def _total(each: MeasuredBlocks, rows: int) -> float:
    ways = (each.forward, each.backward)
    return float(sum(np.nansum(way[0]) + rows * np.nansum(way[1]) for way in ways))
