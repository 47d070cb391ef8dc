"""Routing of micro-batches: which replica of a stage takes which one, and on which host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import gcd
from typing import NamedTuple

Order = tuple[int, ...]
"""The replicas that take successive micro-batches, repeated; empty: round robin."""

MAX_PER_REPLICA = 8
"""The most micro-batches for each replica into which a batch is cut to balance shares."""

TOLERANCE = 1.05
"""A stage within this factor of the ideal time gets no further micro-batches."""


def compute_shares(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """The number of micro-batches of each replica, out of `count`, that minimizes the finishing time.

    Each is assigned to the replica that would finish it first. Every replica has at least one, if there are enough.

    >>> compute_shares([1, 2], 3), compute_shares([1, 2], 4), compute_shares([1, 1, 8], 20)
    ((1, 2), (1, 3), (2, 2, 16))
    """
    found = [int(replica < count) for replica in range(len(speeds))]
    for _ in range(count - sum(found)):
        found[min(range(len(speeds)), key=lambda r: ((found[r] + 1) / speeds[r], r))] += 1
    return tuple(found)


def order_by_shares(shares: Sequence[int]) -> Order:
    """A period in which each replica has its share, spread evenly; round robin if all shares are equal.

    >>> order_by_shares([1, 2]), order_by_shares([2, 4]), order_by_shares([3, 3]), order_by_shares([1, 3, 1])
    ((1, 0, 1), (1, 0, 1), (), (1, 0, 1, 2, 1))
    """
    if len(set(shares)) <= 1:
        return ()
    common = reduce(gcd, shares)
    weights = [share // common for share in shares]
    credit = [0] * len(weights)
    found = []
    for _ in range(sum(weights)):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        first = max(range(len(weights)), key=lambda replica: (credit[replica], -replica))
        credit[first] -= sum(weights)
        found.append(first)
    return tuple(found)


def order_by_speed(speeds: Sequence[float], count: int) -> Order:
    """The order of a stage with replicas of these speeds for `count` micro-batches; round robin if speeds are unknown
    or equal.

    >>> order_by_speed([1, 2], 3), order_by_speed([2, 2], 3), order_by_speed([], 3)
    ((1, 0, 1), (), ())
    """
    return order_by_shares(compute_shares(speeds, count)) if len(set(speeds)) > 1 else ()


def count_turns(order: Order, replicas: int, count: int) -> tuple[int, ...]:
    """How many of `count` micro-batches each replica takes by an order.

    >>> count_turns((1, 0, 1), 2, 4), count_turns((), 3, 4)
    ((1, 3), (2, 1, 1))
    """
    turns = order or tuple(range(replicas))
    found = [0] * replicas
    for number in range(count):
        found[turns[number % len(turns)]] += 1
    return tuple(found)


def compute_spacing(order: Order, replicas: int, *, least: bool = False) -> float:
    """How many micro-batches of the stage there are for each one of the replica that takes the fewest; with `least`, of
    the one that takes the most.

    >>> compute_spacing((1, 0, 1), 2), compute_spacing((1, 0, 1), 2, least=True), compute_spacing((), 4)
    (3.0, 1.5, 4.0)
    """
    found = count_turns(order, replicas, len(order) or replicas)
    return sum(found) / (max(found) if least else min(found))


def compute_share_times(shares: Sequence[int], speeds: Sequence[float]) -> tuple[float, ...]:
    """The time of each replica for its share; a replica of speed 1 takes a second for a micro-batch.

    >>> compute_share_times([1, 3], [1, 2])
    (1.0, 1.5)
    """
    return tuple(share / speed for share, speed in zip(shares, speeds, strict=True))


def compute_excess(speeds: Sequence[float], count: int) -> float:
    """The time of a stage relative to the ideal, as micro-batches are indivisible.

    >>> compute_excess([1, 2], 3), compute_excess([1, 2], 2)
    (1.0, 1.5)
    """
    return max(compute_share_times(compute_shares(speeds, count), speeds)) * sum(speeds) / count


def choose_micro_batches(stages: Sequence[Sequence[float]], least: int = 1) -> int:
    """The smallest number of micro-batches from `least` on with which the shares of all stages are close enough to
    their speeds; otherwise the closest within reason.

    >>> [choose_micro_batches(stages) for stages in ([[1, 2]], [[1, 8]], [[1, 2], [1, 3]], [])]
    [3, 9, 9, 1]
    >>> choose_micro_batches([[1, 1]], least=2)
    2
    """
    uneven = [speeds for speeds in stages if len(set(speeds)) > 1]
    first = max([least, *map(len, uneven)])
    tries = range(first, 1 + max([first, *(MAX_PER_REPLICA * len(speeds) for speeds in uneven)]))
    worst = {count: max((compute_excess(speeds, count) for speeds in uneven), default=1.0) for count in tries}
    near = (count for count in tries if worst[count] <= TOLERANCE)
    return next(near, min(tries, key=lambda count: worst[count]))


class Seat(NamedTuple):
    """A replica of a stage, by their numbers."""

    stage: int
    replica: int = 0


def row_name(stage: str, replicas: int, replica: int) -> str:
    """The name of a row of a drawing or report: that of the stage, or of its replica if it has several.

    >>> row_name("npu", 2, 1), row_name("gpu", 1, 0)
    ('npu.1', 'gpu')
    """
    return stage if replicas == 1 else f"{stage}.{replica}"


@dataclass(frozen=True)
class Routing:
    """The host of each replica of each stage. A host is a unit of shared memory: in one process a cluster, in several a
    worker.

    The micro-batches of a step are numbered, and replica m mod R takes micro-batch m, independent of the number of
    replicas of the stage before it: so results do not depend on these numbers. A stage with an order of its own
    (`compute_shares`), as its replicas are not equally fast, assigns micro-batch m by that order.

    >>> routing = Routing((("gpu/0", "gpu/1", "gpu/2"), ("npu/0", "npu/1")))
    >>> [(routing.host(0, m), routing.host(1, m)) for m in range(4)]
    [('gpu/0', 'npu/0'), ('gpu/1', 'npu/1'), ('gpu/2', 'npu/0'), ('gpu/0', 'npu/1')]
    >>> routing.turns(1, "npu/1", 6)
    (1, 3, 5)
    >>> Routing((("gpu/0",), ("npu/0", "npu/1")), ((), (1, 0, 1))).turns(1, "npu/1", 6)
    (0, 2, 3, 5)
    """

    hosts: tuple[tuple[str, ...], ...]
    orders: tuple[Order, ...] = ()

    @classmethod
    def from_hosts(cls, hosts: Iterable[str]) -> Routing:
        """One host for each stage."""
        return cls(tuple((host,) for host in hosts))

    def replica(self, stage: int, micro_batch: int) -> int:
        """The replica of a stage that takes a micro-batch."""
        order = self.orders[stage] if self.orders else ()
        return order[micro_batch % len(order)] if order else micro_batch % len(self.hosts[stage])

    def host(self, stage: int, micro_batch: int) -> str:
        """The host of a stage for a micro-batch."""
        return self.hosts[stage][self.replica(stage, micro_batch)]

    def hosts_of(self, stage: int) -> tuple[str, ...]:
        """The hosts of a stage, each once, in the order of replicas."""
        return tuple(dict.fromkeys(self.hosts[stage]))

    def first(self, stage: int) -> str:
        """The host of a stage's first replica."""
        return self.hosts[stage][0]

    def seat(self, stage: int, micro_batch: int) -> Seat:
        """The replica that takes a micro-batch, with its stage."""
        return Seat(stage, self.replica(stage, micro_batch))

    def seats(self, stage: int, host: str) -> dict[Seat, tuple[int, ...]]:
        """The seats of a stage on a host, each with the replicas that run on it: one seat for each replica, but one for
        all of them if some stage of the plan is on several hosts.
        """
        own = tuple(replica for replica, each in enumerate(self.hosts[stage]) if each == host)
        if self.replicated:
            return {Seat(stage, own[0]): own} if own else {}
        return {Seat(stage, replica): (replica,) for replica in own}

    def turns(self, stage: int, host: str, count: int) -> tuple[int, ...]:
        """The micro-batches, of `count`, that a stage takes on a host."""
        return tuple(m for m in range(count) if self.host(stage, m) == host)

    @cached_property
    def replicated(self) -> frozenset[int]:
        """The stages on several hosts."""
        return frozenset(stage for stage in range(len(self.hosts)) if len(self.hosts_of(stage)) > 1)

    def pair_hosts(self, source: int, readers: Sequence[int]) -> tuple[tuple[str, str], ...]:
        """The (sending, receiving) hosts between which a stage's tensors may cross in any order."""
        found = ((a, b) for reader in readers for a in self.hosts_of(source) for b in self.hosts_of(reader) if a != b)
        return tuple(dict.fromkeys(found))

    def pairs(self, source: int, readers: Sequence[int], count: int) -> tuple[tuple[str, str], ...]:
        """The (sending, receiving) hosts between which a stage's tensors of `count` micro-batches cross."""
        found = ((self.host(source, m), self.host(reader, m)) for m in range(count) for reader in readers)
        return tuple(dict.fromkeys((a, b) for a, b in found if a != b))
