"""The schedules: for one stage, in which order its micro-batches go forward and backward.

All three run a forward wherever the limit of micro-batches in flight allows it, else a backward; they differ
in the limit alone. A generator knows no times, no links and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from whale_nebula.schedule.instructions import Backward, Forward, Fused, Instruction
from whale_nebula.schedule.limits import check_count, eager_limit, gpipe_limit, one_f_one_b_limit


def gpipe(
    stage: int,
    stages: int,
    micro_batches: int,
    in_flight: int | None = None,
    *,
    backward: bool = True,
    fused: bool | None = None,
    phase: int = 0,
) -> Iterator[Instruction]:
    """All forwards, then all backwards; the activations of the whole batch are held (but by the last stage).

    >>> from whale_nebula.schedule.drawing import picture
    >>> print(picture("gpipe", stages=3, micro_batches=4))
    stage 0 |F0-F1-F2-F3-.........B0====...B1====...B2====...B3====|
    stage 1 |...F0-F1-F2-F3-B0====...B1====...B2====...B3====......|
    stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|
    """
    limit = gpipe_limit(stage, stages, micro_batches) if in_flight is None else in_flight
    return _instructions(stage, stages, micro_batches, limit, backward, fused, phase)


def one_f_one_b(
    stage: int,
    stages: int,
    micro_batches: int,
    in_flight: int | None = None,
    *,
    backward: bool = True,
    fused: bool | None = None,
    phase: int = 0,
) -> Iterator[Instruction]:
    """Fill the pipeline, then one backward for each forward; as fast as GPipe, with fewer activations held.

    >>> from whale_nebula.schedule.drawing import picture
    >>> print(picture("1f1b", stages=3, micro_batches=4))
    stage 0 |F0-F1-F2-............B0====F3-B1====...B2====...B3====|
    stage 1 |...F0-F1-......B0====F2-B1====F3-B2====...B3====......|
    stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|

    Over a slow line the first stage waits for gradients:

    >>> print(picture("1f1b", stages=2, micro_batches=5, seconds=2.0))
    stage 0 |F0-F1-..................B0====F2-B1====F3-............B2====F4-B3====...............B4====|
    stage 1 |.........F0-B0====F1-B1====............F2-B2====F3-B3====............F4-B4====............|
    """
    limit = one_f_one_b_limit(stage, stages, micro_batches) if in_flight is None else in_flight
    return _instructions(stage, stages, micro_batches, limit, backward, fused, phase)


def eager_one_f_one_b(
    stage: int,
    stages: int,
    micro_batches: int,
    in_flight: int | None = None,
    *,
    backward: bool = True,
    fused: bool | None = None,
    phase: int = 0,
) -> Iterator[Instruction]:
    """1F1B with so many more micro-batches in flight that the line's round trip is hidden.

    >>> from whale_nebula.schedule.drawing import picture
    >>> print(picture("eager-1f1b", stages=2, micro_batches=5, seconds=2.0))
    stage 0 |F0-F1-F2-F3-............B0====F4-B1====...B2====...B3====...B4====|
    stage 1 |.........F0-B0====F1-B1====F2-B2====F3-B3====F4-B4====............|
    """
    limit = eager_limit(stage, stages, micro_batches) if in_flight is None else in_flight
    return _instructions(stage, stages, micro_batches, limit, backward, fused, phase)


def _instructions(
    stage: int, stages: int, micro_batches: int, limit: int, backward: bool, fused: bool | None, phase: int
) -> Iterator[Instruction]:
    check_count("micro_batch", micro_batches)
    check_count("in_flight", limit)
    if not backward:
        return (Forward(m, phase) for m in range(micro_batches))
    if stage == stages - 1 if fused is None else fused:
        return (Fused(m, phase) for m in range(micro_batches))
    return _alternate(micro_batches, min(limit, micro_batches), phase)


def _alternate(micro_batches: int, limit: int, phase: int) -> Iterator[Instruction]:
    for m in range(micro_batches + limit):
        if m >= limit:
            yield Backward(m - limit, phase)
        if m < micro_batches:
            yield Forward(m, phase)
