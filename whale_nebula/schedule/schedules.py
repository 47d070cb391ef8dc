"""The schedules by name, each stage's list of instructions, and the limits of all stages of a phase.

The schedules differ in how many micro-batches a stage may have in flight; one of them also divides backwards.

"gpipe" runs all forwards, then all backwards: each stage but the last holds the activations of the whole batch.

>>> from whale_nebula.schedule.simulate import draw_schedule
>>> print(draw_schedule("gpipe", stages=3, micro_batches=4))
stage 0 |F0-F1-F2-F3-.........B0====...B1====...B2====...B3====|
stage 1 |...F0-F1-F2-F3-B0====...B1====...B2====...B3====......|
stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|

"1f1b" fills the pipeline, then runs one backward for each forward: as fast, with fewer activations held.

>>> print(draw_schedule("1f1b", stages=3, micro_batches=4))
stage 0 |F0-F1-F2-............B0====F3-B1====...B2====...B3====|
stage 1 |...F0-F1-......B0====F2-B1====F3-B2====...B3====......|
stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|

Over a slow line its first stage waits for gradients. "eager-1f1b" has more in flight, enough to hide the line's
round trip:

>>> print(draw_schedule("1f1b", stages=2, micro_batches=5, seconds=2.0))
stage 0 |F0-F1-..................B0====F2-B1====F3-............B2====F4-B3====...............B4====|
stage 1 |.........F0-B0====F1-B1====............F2-B2====F3-B3====............F4-B4====............|
>>> print(draw_schedule("eager-1f1b", stages=2, micro_batches=5, seconds=2.0))
stage 0 |F0-F1-F2-F3-............B0====F4-B1====...B2====...B3====...B4====|
stage 1 |.........F0-B0====F1-B1====F2-B2====F3-B3====F4-B4====............|

"zero-bubble" holds as many as "eager-1f1b". A backward that other stages wait for computes only the gradient that is
sent back; the gradients of weights ("W") are computed later, when the stage would otherwise wait:

>>> print(draw_schedule("1f1b", stages=3, micro_batches=4))
stage 0 |F0-F1-F2-............B0====F3-B1====...B2====...B3====|
stage 1 |...F0-F1-......B0====F2-B1====F3-B2====...B3====......|
stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|
>>> print(draw_schedule("zero-bubble", stages=3, micro_batches=4))
stage 0 |F0-F1-F2-......B0====F3-B1====B2====B3====|
stage 1 |...F0-F1-...B0=F2-B1=W0~F3-B2=W1~B3=W2~W3~|
stage 2 |......F0-B0=F1-B1=F2-B2=W0~F3-B3=W1~W2~W3~|
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, Protocol

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.ir.routing import Order, compute_spacing


@dataclass(frozen=True, slots=True)
class Instruction:
    """An operation of a stage on one micro-batch. `letters` has a letter for each part: F (forward), B (backward), W
    (gradients of weights).

    >>> print(Forward(3), Forward(3, phase=1), Fused(0), BackwardWeights(2))
    F3 1:F3 FB0 W2
    """

    micro_batch: int
    phase: int = 0
    letters: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{f'{self.phase}:' if self.phase else ''}{self.letters}{self.micro_batch}"


class Forward(Instruction):
    """Run the stage's forward, and keep the activations."""

    __slots__ = ()
    letters = "F"


class Backward(Instruction):
    """Run the stage's backward, and free the activations, except those for gradients of weights with a separate
    instruction.
    """

    __slots__ = ()
    letters = "B"


class BackwardWeights(Instruction):
    """Compute the gradients of the stage's weights, and free their activations."""

    __slots__ = ()
    letters = "W"


class Fused(Instruction):
    """Run forward and backward in one function, without storing activations in between."""

    __slots__ = ()
    letters = "FB"


def to_text(instructions: Iterable[Instruction]) -> str:
    """Write a list of instructions on one line.

    >>> to_text([Forward(0), Forward(1), Backward(0)])
    'F0 F1 B0'
    """
    return " ".join(map(str, instructions))


_ROUNDING = 1e-9  # (0.1 + 0.2)/0.1 is 3.0000000000000004 in floats, which must not add a micro-batch


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations for one micro-batch, measured or estimated, from which eager-1F1B derives limits.

    `compute`: seconds in the slowest stage, forward and backward. `trips`: for each stage but the last, the
    round trip of its messages to the next stage, in seconds. `occupied_seconds`: seconds that the busiest line is
    occupied.
    """

    compute: float
    trips: tuple[float, ...]
    occupied_seconds: float = 0.0

    @property
    def period(self) -> float:
        """Seconds from one micro-batch to the next, if the slowest stage or line is the only limit."""
        return max(self.compute, self.occupied_seconds)

    @property
    def conservative(self) -> Pace:
        """The pace with round trips at least as long as the computation of a micro-batch, for use before they are
        measured. When each process measures separately on machines with other load, too few micro-batches in flight
        cost time; one too many costs no more memory than without a measurement.
        """
        return replace(self, trips=tuple(max(trip, self.compute) for trip in self.trips))

    def covers(self, trip: float) -> int:
        """The number of micro-batches that start while one is computed in the next stage and its gradient returns."""
        return max(1, math.ceil((self.compute + trip) / self.period - _ROUNDING))


def gpipe_limit(stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
    """All micro-batches: every forward runs before the first backward, independent of the pace.

    >>> gpipe_limit(0, 2, 8)
    8
    """
    return micro_batches


def one_f_one_b_limit(stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
    """The number of stages from this one to the last, which fills a pipeline with instantaneous links.

    >>> [one_f_one_b_limit(stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(stages - stage, micro_batches)


def eager_limit(stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
    """One, plus for each hop to the last stage the number of micro-batches that cover its round trip.

    With equal hops and lines faster than the stages: w = p − s + (p − 1 − s)·⌈2·t_c / c⌉. Each hop is rounded up
    separately: each stage runs its list in order, so each needs a whole micro-batch more. Before anything is
    measured, the round trip of a hop is assumed to fit into one c, which makes 2·(p − s) − 1.

    >>> pace = Pace(compute=3.0, trips=(12.0, 12.0, 12.0))
    >>> [eager_limit(stage, 4, 20, pace) for stage in range(4)]
    [16, 11, 6, 1]
    >>> [eager_limit(stage, 4, 20) for stage in range(4)]
    [7, 5, 3, 1]
    """
    if pace is None:
        return min(2 * (stages - stage) - 1, micro_batches)
    if pace.period <= 0.0:
        return micro_batches
    return min(1 + _cover_trips(pace)[min(stage, len(pace.trips))], micro_batches)


@lru_cache(256)
def _cover_trips(pace: Pace) -> tuple[int, ...]:
    """For each stage, the number of micro-batches that start before the gradient of the first one returns, later hops
    included.
    """
    return tuple(accumulate(map(pace.covers, reversed(pace.trips)), initial=0))[::-1]


def limit_descending(values: Iterable[int]) -> list[int]:
    """Give no stage more in flight than a stage before it. It could not use more, because the earlier stage limits its
    inputs, and a list that requires more would deadlock. Descending limits w exclude a deadlock: ordered by (m, stage)
    for forwards and (m + w − ½, −stage) for backwards, every instruction follows all that it depends on, in its own
    list and in the others'.

    >>> limit_descending([3, 5, 2])
    [3, 3, 2]
    """
    return list(accumulate(values, min))


def check_count(option: str, value: int) -> None:
    """Refuse a number of micro-batches that is not a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(
            f"{option}={value!r} is not a positive number of micro-batches",
            why="a stage needs at least one micro-batch in flight",
            mend=f"{option}=1, or more",
        )


class Limit(Protocol):
    """A function that returns the number of micro-batches one stage may have in flight, which defines a schedule."""

    def __call__(self, stage: int, stages: int, micro_batches: int, pace: Pace | None = None, /) -> int:
        """The limit of a stage, with the parameters of `eager_limit`."""


SCHEDULES: dict[str, Limit] = {
    "gpipe": gpipe_limit,
    "1f1b": one_f_one_b_limit,
    "eager-1f1b": eager_limit,
    "zero-bubble": eager_limit,
}
"""The schedules by name; a custom one is another entry."""
DEFAULT = "eager-1f1b"
SPLIT_BACKWARD = frozenset({"zero-bubble"})
"""The schedules in which gradients of weights are separate instructions."""

InFlight = int | list[int] | tuple[int, ...]  # in_flight, as passed by the user


def list_instructions(
    stage: int,
    stages: int,
    micro_batches: int,
    in_flight: int,
    *,
    backward: bool = True,
    fused: bool | None = None,
    phase: int = 0,
    delay: int | None = None,
) -> Sequence[Instruction]:
    """The instruction list of one stage for one phase, with this limit of micro-batches in flight.

    `fused`: forward and backward are one function, by default in the last stage. `delay`: gradients of weights are
    separate instructions, each after this many later backwards.

    >>> from whale_nebula.schedule.schedules import to_text
    >>> to_text(list_instructions(0, 2, 4, in_flight=2))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    >>> to_text(list_instructions(1, 3, 4, in_flight=2, delay=1))
    'F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3'
    >>> to_text(list_instructions(1, 2, 3, in_flight=1, delay=1))
    'FB0 FB1 W0 FB2 W1 W2'
    """
    check_count("micro_batch", micro_batches)
    check_count("in_flight", in_flight)
    if not backward:
        return [Forward(m, phase) for m in range(micro_batches)]
    whole = stage == stages - 1 if fused is None else fused
    limit = 1 if whole else min(in_flight, micro_batches)
    later = micro_batches if delay is None else min(delay, micro_batches)
    found: list[Instruction] = []
    for m in range(micro_batches) if whole else range(-limit, micro_batches):
        found += [(Fused if whole else Backward)(m, phase)] * (m >= 0)
        found += [BackwardWeights(m - later, phase)] * (m >= later)
        found += [Forward(m + limit, phase)] * (not whole and m + limit < micro_batches)
    if delay is not None:
        found += [BackwardWeights(m, phase) for m in range(micro_batches - later, micro_batches)]
    return found


def choose_delays(
    limits: Sequence[int],
    micro_batches: int,
    fused: Sequence[bool],
    *,
    pace: Pace | None = None,
    in_flight: InFlight | None = None,
    recompute: bool = False,
) -> tuple[int, ...]:
    """For each stage, the number of backwards between a backward and its deferred gradients of weights.

    Delays use at most as much memory as the first stage, which has the most in flight: the micro-batches in flight in a
    stage and those kept for gradients of weights do not exceed the number of the first stage. Limits that the user sets
    for each stage are not exceeded. If forwards are computed again (`recompute`), there is no delay: it would undo the
    saving of memory. A stage that waits for a line gains nothing by delays, and still has the deferred work at the end.
    Delays are therefore limited to the time by which the computation of a stage exceeds that of the line. Gradients of
    weights are assumed to take half of a micro-batch's computation: they take a third if each of a product's two
    gradients costs as much as the product.

    >>> choose_delays((4, 3, 2, 1), 8, [False, False, False, True])
    (0, 1, 2, 3)
    >>> [choose_delays((4, 1), 8, [False, True], pace=Pace(3.0, (4.0,), s))[1] for s in (0.0, 2.7, 3.0)]
    [3, 1, 0]
    """
    spare = 1.0 if pace is None or not pace.compute else max(1.0 - pace.occupied_seconds / pace.compute, 0.0)
    most = 0 if recompute else math.floor((micro_batches - 1) * 2 * spare + _ROUNDING)
    kept = limits if isinstance(in_flight, list | tuple) else [limits[0]] * len(limits)
    held = [1 if whole else limit for limit, whole in zip(limits, fused, strict=True)]
    return tuple(min(room - own, most) for room, own in zip(kept, held, strict=True))


def find_limit(name: str) -> Limit:
    """The limit function of a schedule; raises an `OptionError` with a suggestion if its name is unknown.

    >>> find_limit("1f1b")(0, 3, 8)
    3
    """
    found = SCHEDULES.get(name)
    if found is None:
        raise OptionError(f"unknown schedule {name!r}", mend=did_you_mean(name, SCHEDULES))
    return found


def limits(
    name: str,
    stages: int,
    micro_batches: int,
    *,
    pace: Pace | None = None,
    in_flight: InFlight | None = None,
    replicas: Sequence[int] = (),
    orders: Sequence[Order] = (),
) -> tuple[int, ...]:
    """The most micro-batches in flight in each stage, none more than in an earlier one (see `limit_descending`).

    `pace` is the measured or estimated pace. `in_flight` is the user's option, for all stages or for each, and replaces
    the schedule's limit. It applies to one replica: with `replicas`, the limit of a stage is multiplied by the largest
    number of replicas among this stage and later ones. If replicas take micro-batches in `orders`, a replica that takes
    few counts its own and those of the others in between; the replica that takes the most does not exceed the user's
    limit.

    >>> limits("1f1b", 2, 8, replicas=[1, 3])
    (6, 3)
    >>> limits("1f1b", 2, 8, replicas=[1, 2], orders=[(), (1, 1, 0, 1)])
    (8, 4)
    >>> limits("1f1b", 2, 8, replicas=[1, 2], orders=[(), (1, 1, 0, 1)], in_flight=3)
    (4, 4)
    >>> limits("1f1b", 3, 8), limits("1f1b", 3, 8, in_flight=5), limits("gpipe", 3, 8, in_flight=[4, 6, 1])
    ((3, 2, 1), (5, 5, 5), (4, 4, 1))
    """
    own = find_limit(name)
    check_count("micro_batch", micro_batches)
    if in_flight is None:
        found = limit_descending(own(stage, stages, micro_batches, pace) for stage in range(stages))
    else:
        found = limit_descending(_list_user_limits(in_flight, stages, micro_batches))
    pairs = zip(orders or [()] * len(replicas), replicas, strict=True)
    wide = [compute_spacing(*each, least=in_flight is not None) for each in pairs]
    most = list(accumulate(reversed(wide or [1.0] * stages), max))[::-1]
    return tuple(min(int(limit * copies), micro_batches) for limit, copies in zip(found, most, strict=True))


def _list_user_limits(in_flight: InFlight, stages: int, micro_batches: int) -> Iterator[int]:
    chosen = in_flight if isinstance(in_flight, list | tuple) else [in_flight] * stages
    if len(chosen) != stages:
        raise OptionError(
            f"in_flight has {len(chosen)} limits, but there are {stages} stages",
            why="it takes one limit for all stages, or one limit for each stage",
            mend=f"pass one number, or {stages} numbers",
        )
    for limit in chosen:
        check_count("in_flight", limit)
        yield min(limit, micro_batches)
