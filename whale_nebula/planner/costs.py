"""Costs of stages: seconds and bytes of every range of blocks, from prefix sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

import numpy as np

from whale_nebula.passes.backward_split import MIN_SHARE
from whale_nebula.planner.problem import Array, Parallelism, Part, Problem
from whale_nebula.schedule.lines import Line

DEEPEST = 24
"""The maximum number of stages within one cluster."""
MOST_PIECES = 16
"""The maximum number of workers that a variable is sharded over."""
_MIXED = -2
SLOW_SUM = 0.3
"""The share of a step's computing from which on all-reduces of gradients count as long."""


def _sum_prefixes(values: Array) -> Array:
    """Prefix sums along the last axis, beginning with 0."""
    total = np.cumsum(values, axis=-1)
    return np.concatenate([np.zeros((*total.shape[:-1], 1)), total], axis=-1)


def _range_maxima(values: Array) -> Array:
    """Range maxima as a matrix: the largest value between each two cuts."""
    cuts = len(values) + 1
    found = np.zeros((cuts, cuts))
    for begin in range(cuts - 1):
        found[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
    return found


@dataclass(frozen=True)
class Costs:
    """The costs of a problem for a number of micro-batches; with `recompute` the backward repeats the forward."""

    problem: Problem
    micro_batches: int
    recompute: bool = False

    @cached_property
    def rows(self) -> int:
        """The rows of a micro-batch."""
        return self.problem.rows_of(self.micro_batches)

    @cached_property
    def direction_seconds(self) -> tuple[Array, Array]:
        """Prefix sums of the seconds of forward and backward, a row for each cluster, without costs of calls."""
        forward = np.stack([cluster.forward[0] + self.rows * cluster.forward[1] for cluster in self.problem.clusters])
        backward = np.stack(
            [cluster.backward[0] + self.rows * cluster.backward[1] for cluster in self.problem.clusters]
        )
        if self.recompute:
            backward = backward + forward
        share = 1.0 - 1.0 / self.micro_batches
        backward += share * np.outer(
            [cluster.accumulation for cluster in self.problem.clusters], self.problem.chain.gradients
        )
        return _sum_prefixes(forward), _sum_prefixes(backward)

    @cached_property
    def _deferred(self) -> tuple[Array, Array]:
        """Prefix sums of the seconds of gradients of weights, a row for each cluster; and the bytes of those gradients
        beyond the share with which a backward is divided.
        """
        chain, clusters = self.problem.chain, self.problem.clusters
        none = np.zeros((2, len(chain)))
        given = [none if cluster.deferred_backward is None else cluster.deferred_backward for cluster in clusters]
        later = np.stack([each[0] + self.rows * each[1] for each in given])
        return _sum_prefixes(later), _sum_prefixes(
            (0.0 if chain.separate_gradients is None else chain.separate_gradients) - MIN_SHARE * chain.gradients
        )

    @cached_property
    def _calls(self) -> tuple[Array, Array]:
        """The part of these seconds that does not depend on rows; sharding variables does not reduce it."""
        forward = np.stack([cluster.forward[0] for cluster in self.problem.clusters])
        backward = np.stack([cluster.backward[0] for cluster in self.problem.clusters])
        return _sum_prefixes(forward), _sum_prefixes(backward + forward if self.recompute else backward)

    @cached_property
    def least_seconds(self) -> tuple[float, float]:
        """Lower bounds for plans without sharding: seconds of one micro-batch through all blocks, and of a step with
        all workers busy all the time.
        """
        clusters, busy = self.problem.clusters, np.diff(self.direction_seconds[0] + self.direction_seconds[1])
        fused = min(1.0, *(cluster.fused_ratio for cluster in clusters))
        single = (busy - np.diff(self._deferred[0])).min(0).sum()
        step = self.micro_batches * busy.min(0).sum() / sum(cluster.workers for cluster in clusters)
        return fused * float(single), fused * float(step)

    @cached_property
    def has_backward(self) -> bool:
        """Whether the program has a backward."""
        return bool(self.direction_seconds[1][:, -1].any())

    @cached_property
    def updates(self) -> Array:
        """Prefix sums of the seconds of updates, a row for each cluster."""
        return _sum_prefixes(np.stack([cluster.update for cluster in self.problem.clusters]))

    @cached_property
    def gradients(self) -> Array:
        """Prefix sums of the bytes of gradients."""
        return _sum_prefixes(self.problem.chain.gradients)

    @cached_property
    def _resident(self) -> Array:
        """Prefix sums of the resident bytes of a worker: weights, optimizer slots, and rows of tables."""
        return _sum_prefixes(self.problem.chain.resident)

    @cached_property
    def _activations(self) -> Array:
        return _sum_prefixes(self.problem.chain.activations) * self.rows

    @cached_property
    def _deferred_inputs(self) -> Array:
        """Prefix sums of the bytes of a micro-batch that pending gradients of weights need."""
        chain = self.problem.chain
        return _sum_prefixes(chain.activations if chain.deferred_inputs is None else chain.deferred_inputs) * self.rows

    @cached_property
    def sent_bytes(self) -> Array:
        """Bytes of a micro-batch's activations that cross at each cut."""
        return self.problem.chain.sent_bytes * self.rows

    @cached_property
    def returned_bytes(self) -> Array:
        """Bytes of a micro-batch's gradients that cross back at each cut."""
        return self.problem.chain.returned_bytes * self.rows

    def size_crossing(self, one: Part, other: Part) -> tuple[float, float, Array]:
        """Costs of a micro-batch between two stages: bytes there and back, and seconds to encode and to decode them."""
        chain, at = self.problem.chain, other.begin
        codec = chain.uncompressed if one.cluster == other.cluster else chain.codec_choices[other.codec]
        return (
            float(codec.sent_bytes[at]) * self.rows,
            float(codec.returned_bytes[at]) * self.rows,
            codec.seconds[:, at] * self.rows,
        )

    def seconds(self, cluster: int, shards: int = 1) -> Array:
        """Forward and backward seconds between each two cuts, as matrices; zero below the diagonal."""
        own = self.problem.clusters[cluster]
        total = self._spread(cluster, shards, False) + self._spread(cluster, shards, True)
        found = total[None, :] - total[:, None] + own.call * (2 if self.has_backward else 1)
        found[:, -1] = (
            found[:, -1] - own.call * self.has_backward
        ) * own.fused_ratio  # one call for forward and backward
        found = np.where(self.ranges, found, 0.0)
        there, back = self._handling(cluster)
        ends = there + back
        more = ends[:, None] + ends[None, :]
        if shards > 1:
            more = (
                more
                + self._collect(cluster, shards, self.sent_bytes)
                + self._collect(cluster, shards, self.returned_bytes)
            )
        return found + np.where(self.ranges, more, 0.0)

    def _handling(self, cluster: int) -> tuple[Array, Array]:
        """Seconds of computing to handle the tensors that cross at each cut, on either side, in both directions."""
        own, chain = self.problem.clusters[cluster], self.problem.chain
        none = np.zeros(len(chain) + 1)
        sizes = (self.sent_bytes, chain.sent_tensors), (self.returned_bytes, chain.returned_tensors)
        there, back = (own.crossing * size + own.message * (none if many is None else many) for size, many in sizes)
        return there, back

    def part_handling(self, part: Part) -> tuple[float, float]:
        """Seconds of computing to handle the tensors that cross at both ends of a stage, in both directions."""
        there, back = (float(each[part.begin] + each[part.end]) for each in self._handling(part.cluster))
        return there, back * self.has_backward

    def _spread(self, cluster: int, shards: int, backward: bool) -> Array:
        """Prefix sums of the seconds of forward or backward with variables in `shards` pieces."""
        total, calls = self.direction_seconds[backward][cluster], self._calls[backward][cluster]
        return total if shards == 1 else calls + (total - calls) / shards

    def _collect(self, cluster: int, shards: int, sizes: Array) -> Array:
        """Seconds of collectives of a sharded stage as a matrix of ranges: an all-gather at each inner cut, and the
        transfer of the whole tensors at both ends.
        """
        inside = self.problem.clusters[cluster].inner_line
        gathered = np.where(sizes > 0, sizes * ((shards - 1) / shards / inside.rate) + (shards - 1) * inside.delay, 0.0)
        up_to = np.cumsum(gathered)
        ends = gathered + np.where(sizes > 0, sizes * ((shards - 1) / inside.rate), 0.0)
        return np.maximum(up_to[None, :] - gathered[None, :] - up_to[:, None], 0.0) + ends[:, None] + gathered[None, :]

    def _collect_for(self, part: Part, sizes: Array) -> float:
        return float(self._collect(part.cluster, part.shards, sizes)[part.begin, part.end]) if part.shards > 1 else 0.0

    def collect_seconds(self, part: Part) -> float:
        """Seconds of collectives within the seconds of a micro-batch in a sharded stage."""
        return (
            self._collect_for(part, self.sent_bytes) + self._collect_for(part, self.returned_bytes) * self.has_backward
        )

    def is_split_worth_trying(self, cluster: int) -> bool:
        """Whether sharding is to be tried: one worker's memory is too small for all blocks, or all-reduces of gradients
        take long.
        """
        one = self.problem.clusters[cluster]
        work = fsum(self.part_seconds(Part(cluster, 0, len(self.problem.chain)))) * self.micro_batches / one.workers
        added = _sum_seconds(self.gradients[-1], one.workers, one.inner_line)
        short = any(self.whole_bytes(1) > each.memory for each in self.problem.clusters)
        return short or bool(added > SLOW_SUM * work)

    def whole_bytes(self, in_flight: int) -> float:
        """Bytes that one worker needs for all blocks, with this number of micro-batches in flight."""
        return self.part_bytes(Part(0, 0, len(self.problem.chain)), in_flight)

    def list_parallelisms(self, cluster: int) -> list[Parallelism]:
        """The numbers of replicas and of shards to try."""
        options, workers = self.problem.options, self.problem.clusters[cluster].workers
        most = min(workers, MOST_PIECES) if options.replica in (None, 1) else 1
        numbers = sorted({2**power for power in range(1, most.bit_length())} | {most}) if most > 1 else []
        pieces = [Parallelism(1, number) for number in numbers]
        if options.split and pieces:
            return pieces
        tried = pieces if options.split is None and self.is_split_worth_trying(cluster) else []
        return [*(Parallelism(number) for number in self._list_replicas(cluster)), *tried]

    def _list_replicas(self, cluster: int) -> list[int]:
        """The numbers of replicas to try: all small ones, then powers of two and the maximum."""
        workers, asked = self.problem.clusters[cluster].workers, self.problem.options.replica
        if asked is not None:
            return [asked]
        most = min(workers, self.micro_batches)
        if most <= 4:
            return list(range(1, most + 1))
        powers = {2**power for power in range(most.bit_length()) if 2**power <= most} | {most}
        return sorted(d for d in powers if d * DEEPEST * 2 >= workers)

    @cached_property
    def ranges(self) -> np.ndarray:
        """Mask of the ranges that have at least one block and may be one stage."""
        cuts = len(self.problem.chain) + 1
        return np.triu(np.ones((cuts, cuts), bool), 1) & (self._written_stages != _MIXED)

    @cached_property
    def _written_stages(self) -> np.ndarray:
        """For each range of blocks, the number of the written stage that it contains: -1 for none, `_MIXED` for several
        or a part of one.
        """
        cuts = len(self.problem.chain) + 1
        begin, end = np.ogrid[:cuts, :cuts]
        found = np.full((cuts, cuts), -1)
        for number, each in enumerate(self.problem.written_stages):
            whole = (begin <= each.begin) & (each.end <= end) & (found == -1)
            found = np.where((begin < each.end) & (each.begin < end), np.where(whole, number, _MIXED), found)
        return found

    def mask_stages(self, cluster: int) -> np.ndarray:
        """Mask of the ranges that may be a stage of a cluster."""
        admitted = np.array([*(each.admits(cluster) for each in self.problem.written_stages), True])
        found = self.ranges & admitted[np.maximum(self._written_stages, -1)]
        for each in self.problem.pinned_blocks:
            if cluster not in each.clusters:
                found[: each.block + 1, each.block + 1 :] = False
        return found

    def count_replicas(self, replicas: int) -> Array:
        """The number of replicas of each range: the user's for the written stage in it, if any, else `replicas`."""
        return np.array([*(each.replicas or replicas for each in self.problem.written_stages), replicas])[
            np.maximum(self._written_stages, -1)
        ]

    def mask_replicable(self, replicas: int) -> np.ndarray:
        """Mask of the ranges that may have so many replicas: with rows of a table one, unless the user says more."""
        if replicas == 1 or self.problem.options.replica is not None:
            return np.ones_like(self.ranges)
        single = _sum_prefixes(self.problem.chain.single.astype(float))
        said = np.array([*(each.replicas is not None for each in self.problem.written_stages), False])
        return (single[None, :] <= single[:, None]) | said[np.maximum(self._written_stages, -1)]

    def bytes(self, in_flight: Any, shards: int = 1) -> Array:
        """Bytes that a worker needs for each range of blocks, by the number of micro-batches in flight."""
        begin, end = np.ogrid[: len(self.ranges), : len(self.ranges)]
        return np.where(self.ranges, self._most_bytes(begin, end, shards, in_flight, in_flight), 0.0)

    def _most_bytes(self, begin: Any, end: Any, shards: int, in_flight: Any, came: Any, later: int = 0) -> Any:
        """Peak bytes of a worker: weights and slots, and the larger need of two moments of a step.

        A backward needs the activations of micro-batches in flight, the inputs of those that `came` in, the sum of
        gradients so far, and the new gradients, which are added one by one. A last stage has forward and backward in
        one function, which frees activations as gradients appear. An update needs the sums, and the temporary tensors
        of its largest variable; if these are not counted, two if the optimizer has slots, else one. A step that is not
        cut is TensorFlow's own: it updates all variables concurrently, so with slots there is a temporary tensor for
        each.
        """
        gradients, slots = ((each[end] - each[begin]) / shards for each in (self.gradients, self._slots))
        largest = self._largest[begin, end] / shards
        held = self._activations[end] - self._activations[begin]
        sweep = self._tail_peaks[begin] - self._activations[begin] + self.gradients[end]
        whole = (end == len(self.problem.chain)) & (shards == 1)
        own = np.where(whole, sweep, held + gradients + self._transient[begin, end])
        added = np.where(whole, 0.0, held) + 2 * gradients + largest

        def others(number: Any) -> Any:
            kept = 0.0 if self.recompute else held * (number - 1)
            return kept + later * (self._deferred_inputs[end] - self._deferred_inputs[begin])

        arrived = self.sent_bytes[begin] * np.maximum(came, in_flight)
        backward = others(in_flight) + own
        if self.micro_batches > 1:  # the second one runs with the gradients of the first
            second = others(np.minimum(in_flight, self.micro_batches - 1))
            backward = np.maximum(backward, second + np.maximum(own + gradients, added))
        uncut = whole & (begin == 0) & (self.micro_batches == 1)
        counted = self.problem.chain.update_temporaries
        temporaries = np.where(slots > 0, 2, 1) if counted is None else counted
        concurrent = largest + np.where(slots > 0, gradients, 0.0)
        update = gradients + np.where(uncut, concurrent, temporaries * largest)
        return (self._resident[end] - self._resident[begin]) / shards + np.maximum(backward + arrived, update)

    @cached_property
    def _slots(self) -> Array:
        return _sum_prefixes(self.problem.chain.slots)

    @cached_property
    def _tail_peaks(self) -> Array:
        """For the range from each cut to the end, whose activations are freed while its gradients appear: the peak of
        both, less the part that does not depend on the cut.
        """
        chain = self.problem.chain
        at = self._activations[1:] - self.gradients[:-1] + chain.transient * self.rows
        return np.append(np.maximum.accumulate(at[::-1])[::-1], 0.0)

    @cached_property
    def _transient(self) -> Array:
        """The largest transient of each range of blocks."""
        return _range_maxima(self.problem.chain.transient * self.rows)

    @cached_property
    def _largest(self) -> Array:
        """The largest gradient of one variable in each range of blocks."""
        chain = self.problem.chain
        return _range_maxima(chain.gradients if chain.largest_gradient is None else chain.largest_gradient)

    def part_seconds(self, part: Part) -> tuple[float, float]:
        """Forward and backward seconds of one micro-batch in a stage, with its calls; the last stage makes one call for
        both.
        """
        sums = [self._spread(part.cluster, part.shards, backward) for backward in (False, True)]
        forward, backward = (float(each[part.end] - each[part.begin]) for each in sums)
        cluster, last = self.problem.clusters[part.cluster], part.end == len(self.problem.chain)
        share, call = (cluster.fused_ratio, 0.0) if last else (1.0, cluster.call)
        there, back = (self._collect_for(part, sizes) for sizes in (self.sent_bytes, self.returned_bytes))
        return share * (forward + cluster.call) + there, (share * (backward + call) + back) * self.has_backward

    def part_deferred_seconds(self, part: Part) -> float:
        """Seconds of a stage's backward that may be deferred, if it is divided (see `passes.backward_split`). The first
        stage sends no gradient back, so its backward is not divided; neither is that of a sharded stage.
        """
        seconds, beyond = self._deferred
        if part.begin == 0 or part.shards > 1 or beyond[part.end] < beyond[part.begin]:
            return 0.0
        return float(seconds[part.cluster][part.end] - seconds[part.cluster][part.begin])

    def part_bytes(self, part: Part, in_flight: int, came: int = 0, later: int = 0) -> float:
        """Bytes of a worker of a stage, with `in_flight` micro-batches, `came` whose input has arrived, and `later`
        with pending gradients of weights.
        """
        return float(self._most_bytes(part.begin, part.end, part.shards, in_flight, came, later))

    def part_update(self, part: Part) -> float:
        """Seconds of a stage's update, with the all-reduce of its gradients over replicas."""
        update = float(self.updates[part.cluster][part.end] - self.updates[part.cluster][part.begin])
        size = float(self.gradients[part.end] - self.gradients[part.begin])
        return (
            update + _sum_seconds(size, part.replicas, self.problem.clusters[part.cluster].inner_line)
        ) / part.shards

    def allreduce_seconds(self, cluster: int, replicas: Any) -> Array:
        """Seconds of the all-reduce of gradients for each range of blocks."""
        size = self.gradients[None, :] - self.gradients[:, None]
        return np.where(self.ranges, _sum_seconds(size, replicas, self.problem.clusters[cluster].inner_line), 0.0)


def _sum_seconds(size: Any, replicas: Any, inside: Line) -> Any:
    """Seconds of a ring all-reduce of `size` bytes among replicas; 0 for one replica."""
    return size * (2.0 * (replicas - 1) / replicas / inside.rate) + 2.0 * (replicas - 1) * inside.delay
