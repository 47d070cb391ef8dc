"""What stages of a problem cost: seconds and bytes of every range of blocks, from running sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whale_nebula.passes.parting import LEAST
from whale_nebula.planner.problem import Array, Part, Problem, Wire


def _sums(values: Array) -> Array:
    """Running sums, from 0 on, along the last axis."""
    total = np.cumsum(values, axis=-1)
    return np.concatenate([np.zeros((*total.shape[:-1], 1)), total], axis=-1)


@dataclass(frozen=True)
class Costs:
    """The costs of a problem with so many micro-batches; with `recompute` the backward runs the forward again."""

    problem: Problem
    micro_batches: int
    recompute: bool = False

    @cached_property
    def rows(self) -> int:
        """The rows of a micro-batch."""
        return self.problem.rows_of(self.micro_batches)

    @cached_property
    def ways(self) -> tuple[Array, Array]:
        """Seconds of forward and backward up to each cut, a row for each site, without the calls."""
        forward = np.stack([site.forward[0] + self.rows * site.forward[1] for site in self.problem.sites])
        backward = np.stack([site.backward[0] + self.rows * site.backward[1] for site in self.problem.sites])
        if self.recompute:
            backward = backward + forward
        return _sums(forward), _sums(backward)

    @cached_property
    def _later(self) -> tuple[Array, Array]:
        """Seconds of gradients of weights alone up to each cut, a row for each site; and the bytes of those gradients
        beyond the share with which a backward is parted.
        """
        chain, sites = self.problem.chain, self.problem.sites
        none = np.zeros((2, len(chain)))
        given = [none if site.later is None else site.later for site in sites]
        later = np.stack([each[0] + self.rows * each[1] for each in given])
        return _sums(later), _sums((0.0 if chain.apart is None else chain.apart) - LEAST * chain.gradients)

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return bool(self.ways[1][:, -1].any())

    @cached_property
    def updates(self) -> Array:
        """Seconds of updates up to each cut, a row for each site."""
        return _sums(np.stack([site.update for site in self.problem.sites]))

    @cached_property
    def gradients(self) -> Array:
        """Bytes of gradients up to each cut."""
        return _sums(self.problem.chain.gradients)

    @cached_property
    def _resident(self) -> Array:
        """Bytes that a worker holds all the time, up to each cut: weights, slots, and gradients as they are added."""
        chain = self.problem.chain
        return _sums(chain.weights + chain.slots + chain.gradients * (2 if self.micro_batches > 1 else 1))

    @cached_property
    def _held(self) -> Array:
        return _sums(self.problem.chain.held)

    @cached_property
    def there(self) -> Array:
        """Bytes of a micro-batch that are needed from before each cut."""
        return self.problem.chain.there * self.rows

    def crossing(self, one: Part, other: Part) -> tuple[float, float, Array]:
        """Bytes of a micro-batch that cross from one stage to the next, and back; and seconds to encode and to decode
        what goes there and what comes back.
        """
        chain, at = self.problem.chain, other.begin
        way = chain.plain if one.site == other.site else chain.choices[other.codec]
        return float(way.there[at]) * self.rows, float(way.back[at]) * self.rows, way.seconds[:, at] * self.rows

    def seconds(self, site: int) -> Array:
        """Forward and backward of the blocks from each cut to each other one, a matrix; nothing below the diagonal."""
        forward, backward = self.ways
        total = forward[site] + backward[site]
        calls = self.problem.sites[site].call * (2 if self.trains else 1)
        return np.where(self.upper, total[None, :] - total[:, None] + calls, 0.0)

    @cached_property
    def upper(self) -> np.ndarray:
        """Where a range has at least one block."""
        cuts = len(self.problem.chain) + 1
        return np.triu(np.ones((cuts, cuts), bool), 1)

    def bytes(self, in_flight: int) -> Array:
        """What a worker needs for the blocks from each cut to each other one, with so many micro-batches in flight."""
        held = self._count_held(self._held[None, :] - self._held[:, None], self.there[:, None], in_flight)
        resident = self._resident[None, :] - self._resident[:, None]
        return np.where(self.upper, resident + held + self._transient, 0.0)

    def _count_held(self, by_row: Any, came_in: Any, in_flight: int) -> Any:
        """Bytes that are kept for backwards: where forwards are computed again, of each micro-batch in flight what came
        in, and of one all that its backward needs.
        """
        held = by_row * self.rows
        return held + came_in * in_flight if self.recompute else held * in_flight

    @cached_property
    def _transient(self) -> Array:
        """The largest transient of the blocks from each cut to each other one."""
        blocks = self.problem.chain.transient * self.rows
        cuts = len(blocks) + 1
        found = np.zeros((cuts, cuts))
        for begin in range(cuts - 1):
            found[begin, begin + 1 :] = np.maximum.accumulate(blocks[begin:])
        return found

    def part_seconds(self, part: Part) -> tuple[float, float]:
        """Forward and backward of one micro-batch in one stage, with their calls."""
        forward, backward = (way[part.site][part.end] - way[part.site][part.begin] for way in self.ways)
        call = self.problem.sites[part.site].call
        return float(forward) + call, float(backward) + call * self.trains

    def part_later(self, part: Part) -> float:
        """Seconds of a stage's backward that may come later, where it is parted: see `passes.parting`. Nothing goes
        back from the first stage, so there it is not.
        """
        seconds, beyond = self._later
        if part.begin == 0 or beyond[part.end] < beyond[part.begin]:
            return 0.0
        return float(seconds[part.site][part.end] - seconds[part.site][part.begin])

    def part_bytes(self, part: Part, in_flight: int) -> float:
        """What a worker of one stage needs."""
        held = float(self._count_held(self._held[part.end] - self._held[part.begin], self.there[part.begin], in_flight))
        resident = float(self._resident[part.end] - self._resident[part.begin])
        transient = float(self.problem.chain.transient[part.begin : part.end].max()) * self.rows
        return resident + held + transient

    def part_update(self, part: Part) -> float:
        """Seconds that the update of a stage takes, with the sum of its gradients over its replicas."""
        update = float(self.updates[part.site][part.end] - self.updates[part.site][part.begin])
        size = float(self.gradients[part.end] - self.gradients[part.begin])
        return update + _sum_seconds(size, part.replicas, self.problem.sites[part.site].inside)

    def reduction(self, site: int, replicas: int) -> Array:
        """Seconds that replicas need to sum the gradients of the blocks from each cut to each other one."""
        size = self.gradients[None, :] - self.gradients[:, None]
        return np.where(self.upper, _sum_seconds(size, replicas, self.problem.sites[site].inside), 0.0)


def _sum_seconds(size: Any, replicas: int, inside: Wire) -> Any:
    """An all-reduce of so many bytes in a ring of replicas."""
    if replicas == 1:
        return 0.0 * size
    return size * (2.0 * (replicas - 1) / replicas / inside.rate) + 2.0 * (replicas - 1) * inside.delay
