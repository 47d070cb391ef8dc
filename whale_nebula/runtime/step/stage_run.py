"""Execute one stage in one step: gather inputs, call its functions, and pass on its outputs.

The same code runs inside a traced function (all stages in one process, links free) and as an actor (a thread a
stage); they differ in the `BoundaryExchange` that passes values between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from whale_nebula.feed.inputs import Batch
from whale_nebula.ir.cut import PhasePlan
from whale_nebula.passes.exchange import ReplicaMessage
from whale_nebula.runtime.replicas.bucketed_allreduce import BucketedAllReduce
from whale_nebula.runtime.step.clock import StageClock
from whale_nebula.runtime.step.compiled import BoundFunction, Compiled, Feed
from whale_nebula.runtime.step.gradients import GradientSums
from whale_nebula.spec import Value


class BoundaryExchange(Protocol):
    """The interface of an exchange of values between the stages of a step."""

    def put(self, value: Value, micro_batch: int, tensor: Any, rows: Any = None) -> None:
        """Send a value to the stages that read it; `rows` is a mask of the rows that they need."""

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Receive a value from another stage; waits for it."""


@dataclass
class StageRun:
    """The state of a stage, or of one of its replicas, in a step. `turns` are the micro-batches that it runs here,
    `local_values` their values while they are needed, `kept_values` those for the update. `whole_batch_values` are
    computed once a step. `summed_messages` are the gradients that are already summed over all replicas. With
    `is_sampled`, each piece is timed until its device has finished.
    """

    compiled: Compiled
    stage: int
    batch: Batch
    exchange: BoundaryExchange
    whole_batch_values: dict[Value, Any]
    sums: GradientSums
    clock: StageClock = field(default_factory=StageClock)
    turns: Sequence[int] = ()
    allreduce: BucketedAllReduce | None = None
    is_sampled: bool = False
    summed_messages: set[ReplicaMessage] = field(default_factory=set)
    local_values: dict[int, dict[Value, Any]] = field(default_factory=dict)
    kept_values: dict[Value, dict[int, Any]] = field(default_factory=dict)

    def forward(self, phase: PhasePlan, micro_batch: int) -> None:
        """Run the forward of a micro-batch (with its backward, if they are one function)."""
        pieces = self.compiled.bind_stage(phase, self.stage)
        if pieces is not None and pieces.forward is not None:
            self._run(phase, pieces.forward, micro_batch)
            if pieces.backward is None:
                self._free_values(phase, micro_batch, pieces.weights)

    def backward(self, phase: PhasePlan, micro_batch: int) -> None:
        """Run the backward of a micro-batch, if it is a function of its own, and free its activations, except those
        that deferred gradients of weights need.
        """
        pieces = self.compiled.bind_stage(phase, self.stage)
        if pieces is not None and pieces.backward is not None:
            self._run(phase, pieces.backward, micro_batch)
        self._free_values(phase, micro_batch, None if pieces is None else pieces.weights)

    def backward_weights(self, phase: PhasePlan, micro_batch: int) -> None:
        """Compute the deferred gradients of weights of a micro-batch, and free their inputs."""
        pieces = self.compiled.bind_stage(phase, self.stage)
        if pieces is not None and pieces.weights is not None:
            self._run(phase, pieces.weights, micro_batch)
            self._free_values(phase, micro_batch)

    def skip(self, phase: PhasePlan) -> None:
        """Draw the seeds of a micro-batch that another replica takes."""
        pieces = self.compiled.bind_stage(phase, self.stage)
        if pieces is not None and pieces.skip is not None:
            pieces.skip.function([self._read_feed(feed, -1) for feed in pieces.skip.feeds])

    def join_forward_sums(self, phase: PhasePlan) -> None:
        """Take part in all-reduces with zeros, because this replica has no micro-batch for them."""
        sums, pieces = self.compiled.builder.sums, self.compiled.bind_stage(phase, self.stage)
        if sums is not None and pieces is not None:
            for fragment in pieces.plan.fragments:
                sums.sum_zeros(fragment)

    def _run(self, phase: PhasePlan, piece: BoundFunction, micro_batch: int) -> None:
        with self.clock.time_wait():
            tensors = [self._read_feed(feed, micro_batch) for feed in piece.feeds]
        with self.clock.time_computing(piece.fragment.kind, micro_batch, phase.index):
            results = self._call_piece(phase, piece, micro_batch, tensors)
            self._add_gradients(piece, results)
            if self.is_sampled:
                tf.test.experimental.sync_devices()
        del tensors
        self._pass_on(piece, micro_batch, results)

    def _call_piece(
        self, phase: PhasePlan, piece: BoundFunction, micro_batch: int, tensors: Sequence[Any]
    ) -> dict[Value, Any]:
        """Call a piece. With the last micro-batch, gradients are all-reduced as they are computed. If the piece itself
        contains sums over replicas, the all-reduces wait, so that their order is the same in all replicas.
        """
        last = self.turns and micro_batch == self.turns[-1] and piece.function.waits is None
        if self.allreduce is not None and last and piece.fragment.kind != "forward":
            found = self.allreduce.run_last(self, piece, tensors, self.compiled.replica_messages[phase.index])
            if found is not None:
                return found
        return dict(zip(piece.fetches, piece.function(tensors), strict=True))

    def _read_feed(self, feed: Feed, micro_batch: int) -> Any:
        kind, what = feed
        if kind == "local":
            return self.local_values[micro_batch][what]
        if kind == "boundary":
            return self._read_boundary(what, micro_batch)
        if kind == "leaf":
            return self.batch.slices[micro_batch][what]
        if kind == "once":
            return self.whole_batch_values[what]
        if kind == "arrival":
            return self._sum_arrivals(what, micro_batch)
        return (self.batch.shares if kind == "share" else self.batch.grows)[micro_batch]

    def _read_boundary(self, value: Value, micro_batch: int) -> Any:
        local_values = self.local_values.setdefault(micro_batch, {})
        if value not in local_values:
            local_values[value] = self.exchange.get(value, micro_batch, self.stage)
        return local_values[value]

    def _sum_arrivals(self, feed: Value, micro_batch: int) -> Any:
        """A boundary's gradient: the shares of all stages that read it, added from the last stage to the first. It can
        be received only once.
        """
        if feed in (local_values := self.local_values.setdefault(micro_batch, {})):
            return local_values[feed]
        first, *rest = [self.exchange.get(g, micro_batch, self.stage) for _, g in self.compiled.gradient_flows[feed]]
        for share in rest:
            first = first + share
        if feed in self.compiled.deferred_inputs:
            local_values[feed] = first
        return first

    def _add_gradients(self, piece: BoundFunction, results: dict[Value, Any]) -> None:
        done = {each.key for each in self.summed_messages}
        for request, part in piece.parts:
            if self.compiled.cut.program.requests[request].key_of(part) not in done:
                self.sums.add(request, part, [results[value] for value in part.values])
        for value in piece.summed_only:
            results.pop(value, None)

    def _pass_on(self, piece: BoundFunction, micro_batch: int, results: dict[Value, Any]) -> None:
        compiled, local_values = self.compiled, self.local_values.setdefault(micro_batch, {})
        for value in compiled.masks & results.keys():
            local_values[value] = results[value]
        for value, tensor in results.items():
            boundary = compiled.boundaries.get(value)
            if boundary is not None and boundary.phase == piece.fragment.phase:  # a later phase may compute it again
                rows = None if boundary.mask is None else self._find_row_mask(boundary.mask, micro_batch)
                self.exchange.put(value, micro_batch, tensor, rows)
            elif value in compiled.gradient_shares:
                self.exchange.put(value, micro_batch, tensor)
            if value in compiled.cut.merges:
                self.kept_values.setdefault(value, {})[micro_batch] = tensor
            if value not in compiled.gradient_shares or value in compiled.deferred_inputs:
                local_values[value] = tensor

    def _find_row_mask(self, mask: Value, micro_batch: int) -> Any:
        """The mask of the rows to send; None for all."""
        leaf = self.compiled.cut.program.leaf_ops.get(mask.op)
        return self.local_values[micro_batch].get(mask) if leaf is None else self.batch.slices[micro_batch][leaf]

    def _free_values(self, phase: PhasePlan, micro_batch: int, rest: BoundFunction | None = None) -> None:
        """Drop values that neither the `rest` of a backward nor a later phase needs."""
        later = self.compiled.later_inputs.get((phase.index, self.stage), frozenset())
        later |= frozenset(rest.fragment.feeds if rest is not None else ())
        local_values = self.local_values.get(micro_batch, {})
        self.local_values[micro_batch] = {value: tensor for value, tensor in local_values.items() if value in later}
