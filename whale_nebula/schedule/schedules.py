"""The schedules by name, each stage's list of instructions, and the limits of all stages of a phase.

The schedules differ in one number alone: how many micro-batches a stage may have in flight.

"gpipe" is all forwards, then all backwards: the activations of the whole batch are held (but by the last stage).

>>> from whale_nebula.schedule.drawing import picture
>>> print(picture("gpipe", stages=3, micro_batches=4))
stage 0 |F0-F1-F2-F3-.........B0====...B1====...B2====...B3====|
stage 1 |...F0-F1-F2-F3-B0====...B1====...B2====...B3====......|
stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|

"1f1b" fills the pipeline, then runs one backward for each forward: as fast, with fewer activations held.

>>> print(picture("1f1b", stages=3, micro_batches=4))
stage 0 |F0-F1-F2-............B0====F3-B1====...B2====...B3====|
stage 1 |...F0-F1-......B0====F2-B1====F3-B2====...B3====......|
stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|

Over a slow line its first stage waits for gradients. "eager-1f1b" has so many more in flight that the line's round
trip is hidden:

>>> print(picture("1f1b", stages=2, micro_batches=5, seconds=2.0))
stage 0 |F0-F1-..................B0====F2-B1====F3-............B2====F4-B3====...............B4====|
stage 1 |.........F0-B0====F1-B1====............F2-B2====F3-B3====............F4-B4====............|
>>> print(picture("eager-1f1b", stages=2, micro_batches=5, seconds=2.0))
stage 0 |F0-F1-F2-F3-............B0====F4-B1====...B2====...B3====...B4====|
stage 1 |.........F0-B0====F1-B1====F2-B2====F3-B3====F4-B4====............|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Limit(Protocol):
    """Says how many micro-batches one stage may have in flight: all that a schedule is."""

    def __call__(self, stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
        """Take what `eager_limit` takes, and say how many."""
        ...


SCHEDULES: dict[str, Limit] = {"gpipe": gpipe_limit, "1f1b": one_f_one_b_limit, "eager-1f1b": eager_limit}
"""The schedules by name; another one is another entry."""
DEFAULT = "eager-1f1b"

Chosen = int | list[int] | tuple[int, ...]  # in_flight, as the user gives it


def instructions(
    stage: int,
    stages: int,
    micro_batches: int,
    in_flight: int,
    *,
    backward: bool = True,
    fused: bool | None = None,
    phase: int = 0,
) -> Iterator[Instruction]:
    """The list of one stage for one phase, with so many micro-batches in flight.

    `fused`: forward and backward are one function, as they are in the last stage unless it is said.

    >>> from whale_nebula.schedule.instructions import to_text
    >>> to_text(instructions(0, 2, 4, in_flight=2))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    """
    check_count("micro_batch", micro_batches)
    check_count("in_flight", in_flight)
    if not backward:
        return (Forward(m, phase) for m in range(micro_batches))
    if stage == stages - 1 if fused is None else fused:
        return (Fused(m, phase) for m in range(micro_batches))
    return _alternate(micro_batches, min(in_flight, micro_batches), phase)


def _alternate(micro_batches: int, limit: int, phase: int) -> Iterator[Instruction]:
    for m in range(micro_batches + limit):
        if m >= limit:
            yield Backward(m - limit, phase)
        if m < micro_batches:
            yield Forward(m, phase)


def limit_of(name: str) -> Limit:
    """Find a schedule by its name, or say what was meant.

    >>> limit_of("1f1b")(0, 3, 8)
    3
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
    own = limit_of(name)
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
