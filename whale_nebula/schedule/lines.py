"""The simulator's input: the work of each stage, and the hops between stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from whale_nebula.schedule.schedules import Pace

if TYPE_CHECKING:
    from whale_nebula.hardware import LinkRate


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that a stage computes for one micro-batch; `backward` is None if the stage has no backward, and `weights`
    are the seconds of the gradients of its weights if they are separate from its backward. Each of its `replicas` takes
    a share of the micro-batches: in turn, or in a repeating `order` of their numbers. `slowness` has a factor on these
    seconds for each replica, if they are not equally fast.

    `overhead` is the fixed cost of a micro-batch (calling the functions); it is paid with the forward. `coding` and
    `coding_back` are the seconds of the stage's codecs: it decodes the inputs of a forward (a backward) before it
    computes, and encodes the outputs before its next instruction.

    >>> Work(1.0, 2.0, overhead=0.5).seconds, Work(1.0, 2.0, coding=0.25, coding_back=0.5).seconds_of("B")
    (3.5, 2.5)
    >>> Work(1.0, 1.0, weights=0.5).seconds
    2.5
    >>> uneven = Work(1.0, 2.0, replicas=2, order=(1, 0, 1), slowness=(2.0, 1.0))
    >>> [uneven.replica(m) for m in range(4)], uneven.slowdown(0)
    ([1, 0, 1, 1], 2.0)
    """

    forward: float
    backward: float | None = None
    overhead: float = 0.0
    coding: float = 0.0
    coding_back: float = 0.0
    replicas: int = 1
    order: tuple[int, ...] = ()
    slowness: tuple[float, ...] = ()
    weights: float | None = None

    def replica(self, micro_batch: int) -> int:
        """The replica that takes a micro-batch."""
        return self.order[micro_batch % len(self.order)] if self.order else micro_batch % self.replicas

    def slowdown(self, replica: int) -> float:
        """The slowdown factor of a replica."""
        return self.slowness[replica] if self.slowness else 1.0

    @property
    def max_slowdown(self) -> float:
        """The slowdown factor of the slowest replica."""
        return max(self.slowness, default=1.0)

    @property
    def has_backward(self) -> bool:
        """Whether the stage has a backward."""
        return self.backward is not None

    def seconds_of(self, what: str) -> float:
        """Seconds of the forward ("F") or backward ("B"), including codecs; or of the gradients of weights ("W")."""
        if what == "F":
            return self.forward + self.overhead + self.coding
        if what == "W":
            return self.weights or 0.0
        return 0.0 if self.backward is None else self.backward + self.coding_back

    @property
    def seconds(self) -> float:
        """The total seconds of one micro-batch."""
        return self.seconds_of("F") + self.seconds_of("B") + self.seconds_of("W")

    def times(self, factor: float, codecs: float = 1.0) -> Work:
        """The work with its computation scaled by `factor`, and its codecs by `codecs`."""
        return replace(
            self, forward=self.forward * factor, backward=None if self.backward is None else self.backward * factor,
            overhead=self.overhead * factor, coding=self.coding * codecs, coding_back=self.coding_back * codecs,
            weights=None if self.weights is None else self.weights * factor,
        )  # fmt: skip

    @property
    def undivided(self) -> Work:
        """The work with the backward in one part.

        >>> Work(1.0, 2.0, weights=1.5).undivided.backward
        3.5
        """
        return (
            self
            if self.weights is None
            else replace(self, backward=self.seconds_of("W") + (self.backward or 0.0), weights=None)
        )

    @property
    def codecs(self) -> float:
        """Seconds spent encoding and decoding for one micro-batch."""
        return self.coding + (0.0 if self.backward is None else self.coding_back)


@dataclass(frozen=True, slots=True)
class Line:
    """One direction of a link, with bytes a second and seconds of delay: a message occupies it for bytes / rate seconds
    and arrives `delay` seconds later. Hops that share a link name the same line; their messages then take turns.

    >>> Line("gpu->npu", rate=7.5e6, delay=0.02).seconds(75_000)
    0.01
    """

    name: str = ""
    rate: float = math.inf
    delay: float = 0.0

    @classmethod
    def from_link(cls, link: LinkRate) -> Line:
        """Convert the record of a link; without a rate transfers take no time."""
        return cls(rate=link.rate_bytes_per_s or math.inf, delay=link.delay_s)

    def seconds(self, size: float) -> float:
        """Seconds for which a message of `size` bytes occupies the line."""
        return size / self.rate


@dataclass(frozen=True, slots=True)
class Hop:
    """The traffic between two stages for each micro-batch, in bytes, and its lines.

    Without lines both stages are in one cluster and transfers take no time. `backward` is None if no gradient
    crosses back.
    """

    forward_line: Line | None = None
    backward_line: Line | None = None
    forward: float = 0.0
    backward: float | None = 0.0

    @property
    def round_trip(self) -> float:
        """Seconds that a message and its gradient in return take on idle lines."""
        return _idle_seconds(self.forward_line, self.forward) + _idle_seconds(self.backward_line, self.backward or 0.0)


def _idle_seconds(line: Line | None, size: float) -> float:
    return 0.0 if line is None else line.seconds(size) + line.delay


Hops = Mapping[tuple[int, int], Hop]


def make_hop(name: str, back: str, *, seconds: float = 0.0, delay: float = 0.0) -> Hop:
    """A hop over lines `name` and `back`, given by the seconds that a message occupies its line, in both directions.

    >>> make_hop("0->1", "1->0", seconds=1.5, delay=0.25).round_trip
    3.5
    """
    return Hop(Line(name, 1.0, delay), Line(back, 1.0, delay), seconds, seconds)


def make_uniform_hops(stages: int, *, seconds: float = 0.0, delay: float = 0.0) -> dict[tuple[int, int], Hop]:
    """A chain of stages, each in a separate cluster, with a separate line to the next.

    >>> sorted(make_uniform_hops(3, seconds=1.0))
    [(0, 1), (1, 2)]
    """
    return {
        (s, s + 1): make_hop(f"{s}->{s + 1}", f"{s + 1}->{s}", seconds=seconds, delay=delay) for s in range(stages - 1)
    }


def compute_pace(works: Sequence[Work], hops: Hops) -> Pace:
    """The pace of stages and hops for one micro-batch, as `limits` needs it.

    >>> compute_pace([Work(1.0, 2.0)] * 3, make_uniform_hops(3, seconds=1.0))
    Pace(compute=3.0, trips=(2.0, 2.0), occupied_seconds=1.0)
    """
    away = _round_trip_seconds(len(works), hops)
    trips = tuple(max(here - next_, 0.0) for here, next_ in pairwise(away))
    return Pace(max(work.seconds * work.max_slowdown for work in works), trips, _busiest_seconds(hops))


def _round_trip_seconds(stages: int, hops: Hops) -> list[float]:
    """The longest round-trip time on lines from each stage to the last one and back."""
    away = [0.0] * stages
    for source, destination in sorted(hops, reverse=True):
        away[source] = max(away[source], hops[source, destination].round_trip + away[destination])
    return away


def _busiest_seconds(hops: Hops) -> float:
    occupied: defaultdict[str, float] = defaultdict(float)
    for hop in hops.values():
        for line, size in ((hop.forward_line, hop.forward), (hop.backward_line, hop.backward)):
            if line is not None and size is not None:
                occupied[line.name] += line.seconds(size)
    return max(occupied.values(), default=0.0)
