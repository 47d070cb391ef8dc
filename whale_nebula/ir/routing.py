"""Which replica of a stage takes which micro-batch, and on which host that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from whale_nebula.ir.shares import Order


class Seat(NamedTuple):
    """A replica of a stage, by their numbers."""

    stage: int
    replica: int = 0


def row_name(stage: str, replicas: int, replica: int) -> str:
    """What a stage's row is called in drawings and reports, or its replica's where it has several.

    >>> row_name("npu", 2, 1), row_name("gpu", 1, 0)
    ('npu.1', 'gpu')
    """
    return stage if replicas == 1 else f"{stage}.{replica}"


@dataclass(frozen=True)
class Routing:
    """The host of each replica of each stage. A host is what shares memory for free: in one process a cluster, in
    several a worker.

    The micro-batches of a step are numbered, and replica m mod R takes micro-batch m, however many replicas the stage
    has that it comes from: so results do not depend on the numbers. Where a stage has an order of its own
    (`ir.shares`), as its replicas are not equally fast, that says who takes micro-batch m.

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
    def plain(cls, hosts: Iterable[str]) -> Routing:
        """One host for each stage."""
        return cls(tuple((host,) for host in hosts))

    def replica(self, stage: int, micro_batch: int) -> int:
        """The replica of a stage that takes a micro-batch."""
        order = self.orders[stage] if self.orders else ()
        return order[micro_batch % len(order)] if order else micro_batch % len(self.hosts[stage])

    def host(self, stage: int, micro_batch: int) -> str:
        """Where a stage takes a micro-batch."""
        return self.hosts[stage][self.replica(stage, micro_batch)]

    def of(self, stage: int) -> tuple[str, ...]:
        """The hosts of a stage, each once, the first replica's first."""
        return tuple(dict.fromkeys(self.hosts[stage]))

    def first(self, stage: int) -> str:
        """The host of a stage's first replica."""
        return self.hosts[stage][0]

    def seat(self, stage: int, micro_batch: int) -> Seat:
        """The replica that takes a micro-batch, with its stage."""
        return Seat(stage, self.replica(stage, micro_batch))

    def seats(self, stage: int, host: str) -> dict[Seat, tuple[int, ...]]:
        """The seats of a stage on a host, each with the replicas that sit there: one for each where a process has the
        memory of a whole cluster, one for all where they are a process of their own.
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
        """The stages that several hosts hold."""
        return frozenset(stage for stage in range(len(self.hosts)) if len(self.of(stage)) > 1)

    def joined(self, source: int, readers: Sequence[int]) -> tuple[tuple[str, str], ...]:
        """The (sending, receiving) hosts between which a stage's tensors may cross, by this order or by another."""
        found = ((a, b) for reader in readers for a in self.of(source) for b in self.of(reader) if a != b)
        return tuple(dict.fromkeys(found))

    def pairs(self, source: int, readers: Sequence[int], count: int) -> tuple[tuple[str, str], ...]:
        """The (sending, receiving) hosts between which a stage's tensors of `count` micro-batches cross."""
        found = ((self.host(source, m), self.host(reader, m)) for m in range(count) for reader in readers)
        return tuple(dict.fromkeys((a, b) for a, b in found if a != b))
