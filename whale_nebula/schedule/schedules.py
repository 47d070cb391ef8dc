"""The schedules by name, and what a name means for all stages of a phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import did_you_mean
from whale_nebula.ir.routing import Order, spacing
from whale_nebula.schedule.instructions import Backward, Forward, Fused, Instruction
from whale_nebula.schedule.limits import (
    Pace,
    check_count,
    descending,
    eager_limit,
    gpipe_limit,
    one_f_one_b_limit,
)


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


class Generator(Protocol):
    """Makes the list of one stage for one phase."""

    def __call__(
        self,
        stage: int,
        stages: int,
        micro_batches: int,
        in_flight: int | None = None,
        *,
        backward: bool = True,
        fused: bool | None = None,
        phase: int = 0,
    ) -> Iterator[Instruction]:
        """Take what `gpipe` takes, and make a list."""
        ...


class Limit(Protocol):
    """Says how many micro-batches one stage may have in flight."""

    def __call__(self, stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
        """Take what `eager_limit` takes, and say how many."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """A name, the generator of its lists, and the limit that is its own."""

    name: str
    generate: Generator
    limit: Limit


SCHEDULES = {
    made.name: made
    for made in (
        Schedule("gpipe", gpipe, gpipe_limit),
        Schedule("1f1b", one_f_one_b, one_f_one_b_limit),
        Schedule("eager-1f1b", eager_one_f_one_b, eager_limit),
    )
}
DEFAULT = "eager-1f1b"

Chosen = int | list[int] | tuple[int, ...]  # in_flight, as the user gives it


def schedule(name: str) -> Schedule:
    """Find a schedule by its name, or say what was meant.

    >>> schedule("1f1b").generate.__name__
    'one_f_one_b'
    """
    found = SCHEDULES.get(name)
    if found is None:
        raise OptionError(f"no schedule is called {name!r}", mend=did_you_mean(name, SCHEDULES))
    return found


def limits(
    name: str,
    stages: int,
    micro_batches: int,
    *,
    pace: Pace | None = None,
    in_flight: Chosen | None = None,
    replicas: Sequence[int] = (),
    orders: Sequence[Order] = (),
) -> tuple[int, ...]:
    """The limits of all stages, of which none is above that of a stage before it (see `descending`).

    `pace` is what was measured. `in_flight` is the user's own word, for all stages or for each, and replaces
    what the schedule would say. Each is that of one replica: where stages have `replicas`, what they hold together is
    as many times more as the stage from here on that has most of them needs. Where these take micro-batches in
    `orders`, one that takes few has its own in flight with what others do meanwhile; the user's own word is not
    exceeded by the one that takes most.

    >>> limits("1f1b", 2, 8, replicas=[1, 3])
    (6, 3)
    >>> limits("1f1b", 2, 8, replicas=[1, 2], orders=[(), (1, 1, 0, 1)])
    (8, 4)
    >>> limits("1f1b", 2, 8, replicas=[1, 2], orders=[(), (1, 1, 0, 1)], in_flight=3)
    (4, 4)
    >>> limits("1f1b", 3, 8), limits("1f1b", 3, 8, in_flight=5), limits("gpipe", 3, 8, in_flight=[4, 6, 1])
    ((3, 2, 1), (5, 5, 5), (4, 4, 1))
    """
    own = schedule(name).limit
    check_count("micro_batch", micro_batches)
    if in_flight is not None:
        found = tuple(descending(_choose_limits(in_flight, stages, micro_batches)))
    else:
        found = tuple(descending(own(stage, stages, micro_batches, pace) for stage in range(stages)))
    pairs = zip(orders or [()] * len(replicas), replicas, strict=True)
    wide = [spacing(*each, least=in_flight is not None) for each in pairs]
    most = [max(wide[stage:], default=1.0) for stage in range(stages)]
    return tuple(min(int(limit * copies), micro_batches) for limit, copies in zip(found, most, strict=True))


def _choose_limits(in_flight: Chosen, stages: int, micro_batches: int) -> Iterator[int]:
    chosen = in_flight if isinstance(in_flight, list | tuple) else [in_flight] * stages
    if len(chosen) != stages:
        raise OptionError(
            f"in_flight has {len(chosen)} limits for {stages} stages",
            why="each stage has one limit of its own, or all have the same",
            mend=f"give one number, or {stages}",
        )
    for limit in chosen:
        check_count("in_flight", limit)
        yield min(limit, micro_batches)
