"""The parts of a step that run once: whole-batch values, prologues, rounds of updates, and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from whale_nebula.feed.inputs import Batch
from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle, list_gradient_parts
from whale_nebula.runtime.step.clock import StageClock
from whale_nebula.runtime.step.compiled import BoundFunction, Compiled, Feed
from whale_nebula.runtime.step.gradients import GradientSums, merge, sum_over_stages
from whale_nebula.runtime.step.peers import Peers
from whale_nebula.runtime.step.results import AbsentResult
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.spec import Value


def join_replicas(phase: PhasePlan, runs: Sequence[StageRun]) -> Sequence[StageRun]:
    """One run for each stage: those of its local replicas, joined. Gradients are added in the order of the replicas."""
    by_stage: dict[int, list[StageRun]] = {}
    for run in runs:
        by_stage.setdefault(run.stage, []).append(run)
    return [own[0] if len(own) == 1 else _join_runs(phase, own) for own in by_stage.values()]


def _join_runs(phase: PhasePlan, runs: Sequence[StageRun]) -> StageRun:
    first = runs[0]
    kept_values: dict[Any, dict[int, Any]] = {}
    sums = GradientSums(first.sums.program)
    for run in runs:
        for value, by_number in run.kept_values.items():
            kept_values.setdefault(value, {}).update(by_number)
        run.kept_values.clear()
    for key, part in list_gradient_parts(first.compiled.cut, phase, first.stage):
        rows = _collect_rows(key, len(part.values), runs)
        if rows:
            sums.put(key, rows)
    return replace(first, kept_values=kept_values, sums=sums, turns=tuple(sorted(m for run in runs for m in run.turns)))


def _collect_rows(key: PartKey, pieces: int, runs: Sequence[StageRun]) -> list[tuple[Any, ...]]:
    """The rows of every micro-batch in order, or a sum for each replica."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    for run in runs:
        if run.turns and run.sums.has_part(key):
            columns = [run.sums.pieces(key, piece, run.turns) for piece in range(pieces)]
            found += [(m, tuple(column[m] for column in columns)) for m in columns[0]]
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


ASSERTION = "assertion on values of the whole batch"
"""The name of a piece with only assertions, in errors."""


@dataclass
class WholeBatchRun:
    """The parts of a step that run once on a worker. `values` are those that they have computed or received. In a
    trace, `gate` returns the ops that its updates wait for, given their inputs; otherwise waits for `peers` are timed
    by the `clock`.

    With `lazy`, numbers that are only returned are not awaited.
    """

    compiled: Compiled
    batch: Batch
    values: dict[Value, Any]
    peers: Peers = field(default_factory=Peers)
    clock: StageClock = field(default_factory=StageClock)
    gate: Callable[[Sequence[Any]], Sequence[Any]] = lambda tensors: ()
    lazy: bool = False
    _gate_ops: Sequence[Any] = ()
    _merged_phase: int = -1
    _runs: Sequence[StageRun] = ()
    _received_bundles: set[Bundle] = field(default_factory=set)

    def weigh_micro_batches(self) -> Batch:
        """The batch; if `nb.loss_weight` was used, with the shares of its micro-batches by these weights."""
        piece = self.compiled.loss_weight_function
        if piece is None:
            return self.batch
        weights = [_sum_weights(piece.function([cut[feed.key] for feed in piece.feeds])) for cut in self.batch.slices]
        whole = tf.add_n(weights)
        self.batch = replace(self.batch, shares=[tf.math.divide_no_nan(weight, whole) for weight in weights])
        return self.batch

    def run_whole_batch(self) -> None:
        """Compute batch-wide values of the inputs."""
        if self.compiled.whole_batch_function is not None:
            self._call_function(self.compiled.whole_batch_function, {})

    def run_prologue(self, phase: PhasePlan) -> None:
        """Run the piece before the micro-batches of a phase."""
        piece = self.compiled.bind_prologue(phase)
        if piece is not None:
            self._call_function(piece, {})

    def has_assertions(self, phase: PhasePlan) -> bool:
        """Whether this process checks assertions on merged values in a phase."""
        return any(piece.fragment.round < 0 for piece in self.compiled.bind_updates(phase))

    def check_assertions(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge the stages' values, and check assertions on them, before the update begins."""
        self._merge_micro_batches(phase, runs)
        for piece in self.compiled.bind_updates(phase):
            if piece.fragment.round < 0:
                self._receive_for(phase, piece)
                self._call_function(piece, {})

    def _merge_micro_batches(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge the values of all micro-batches, once in a phase."""
        if self._merged_phase != phase.index:
            self._merged_phase, self._runs, self._received_bundles = phase.index, join_replicas(phase, runs), set()
            if self.compiled.replica_messages[phase.index]:
                with self.clock.time_exchange(phase.index):
                    self.peers.merge_replicas(phase, self._runs)
            self._merge(self._runs)
            if self._sends_early(phase):
                self._send_round(phase, -1)

    def _sends_early(self, phase: PhasePlan) -> bool:
        """Whether any assertion needs values of other processes, which are then sent before the gradients."""
        return any(fragment.round < 0 for found in phase.updates.values() for fragment in found)

    def run_update(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge the stages' values, exchange those that others need, and run the update round by round."""
        self._merge_micro_batches(phase, runs)
        gradients = self.sum_gradients(phase, self._runs)
        merged = (self.values[value] for value in self.compiled.cut.merges if value in self.values)
        self._gate_ops = self.gate([*gradients.values(), *merged])
        self._hand_over(phase, gradients, runs)
        if not self._sends_early(phase):
            self._send_round(phase, -1)
        for piece in self.compiled.bind_updates(phase):
            if piece.fragment.round < 0:
                continue
            self._receive_for(phase, piece)
            self._call_function(piece, gradients)
            self._send_round(phase, piece.fragment.round)
        self._receive_rest(phase)

    def _hand_over(self, phase: PhasePlan, gradients: dict[Value, Any], runs: Sequence[StageRun]) -> None:
        """Hand large gradients over to the updates that read them, and drop all other references to them."""
        holders = self.compiled.cut.program.holders
        for piece in self.compiled.bind_updates(phase):
            for value, slot in piece.function.handover_slots.items():
                slot.put(gradients.pop(value))
                request, holder = holders[value.op]
                for run in (*runs, *self._runs):
                    run.sums.drop(request, holder.source)

    def sum_gradients(self, phase: PhasePlan, runs: Sequence[StageRun]) -> dict[Value, Any]:
        """The gradients that updates read, by their placeholders: sums over stages, with the parts of other workers."""
        parts: dict[PartKey, tuple[Any, ...]] = {}
        for run in runs:
            parts |= {key: found for key, found in run.sums.parts().items() if key[0] in phase.requests}
        with self.clock.time_exchange(phase.index):
            parts = self.peers.exchange_parts(phase, parts)
        return sum_over_stages(self.compiled.cut.program, parts)

    def _merge(self, runs: Sequence[StageRun]) -> None:
        merges = self.compiled.cut.merges
        for run in runs:
            for value, by_number in run.kept_values.items():
                pieces = [by_number[number] for number in sorted(by_number)]
                self.values[value] = merge(merges[value], pieces, self.batch.shares)
            run.kept_values.clear()

    def _send_round(self, phase: PhasePlan, number: int) -> None:
        for bundle in self.compiled.bundles[phase.index]:
            if bundle.round == number and bundle.source == self.compiled.worker:
                self.peers.send(bundle, [self.values[crossing.value] for crossing in bundle.crossings])

    def _receive_for(self, phase: PhasePlan, piece: BoundFunction) -> None:
        """Receive the values of other workers that a piece reads; others may arrive while it runs."""
        for bundle in self._list_due(phase):
            if any(crossing.value in piece.fragment.feeds for crossing in bundle.crossings):
                self._store_bundle(bundle, self._receive_bundle(phase, bundle))

    def _receive_rest(self, phase: PhasePlan) -> None:
        """Receive the values that no update reads: results, and those of later phases."""
        lazy = self.lazy and phase is self.compiled.cut.phases[-1]
        for bundle in self._list_due(phase):
            waits = not (lazy and bundle.specs[0].scalar)
            self._store_bundle(
                bundle, self._receive_bundle(phase, bundle) if waits else self.peers.receive_later(bundle)
            )

    def _list_due(self, phase: PhasePlan) -> list[Bundle]:
        """The messages that this worker has not yet received in a phase."""
        bundles = self.compiled.bundles[phase.index]
        return [
            each for each in bundles if each.destination == self.compiled.worker and each not in self._received_bundles
        ]

    def _receive_bundle(self, phase: PhasePlan, bundle: Bundle) -> Sequence[Any]:
        with self.clock.time_exchange(phase.index):
            return self.peers.receive(bundle)

    def _store_bundle(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        self.values.update(zip((crossing.value for crossing in bundle.crossings), tensors, strict=True))
        self._received_bundles.add(bundle)

    def _call_function(self, piece: BoundFunction, gradients: Mapping[Value, Any]) -> None:
        handover_slots = piece.function.handover_slots
        tensors = [self._read_feed(feed, gradients) for feed in piece.feeds if feed.key not in handover_slots]
        with tf.control_dependencies(self._gate_ops):
            results = piece.function(tensors)
        self.values.update(zip(piece.fetches, results, strict=True))

    def _read_feed(self, feed: Feed, gradients: Mapping[Value, Any]) -> Any:
        if feed.kind == "leaf":
            return self.batch.whole[feed.key]
        if feed.kind == "holder" and feed.key in gradients:  # otherwise another process has sent it
            return gradients[feed.key]
        return self.values[feed.key]

    def collect_results(self) -> list[Any]:
        """The tensors that the user's step returns."""
        return [self._find_result(value) for value in self.compiled.cut.program.returns]

    def _find_result(self, value: Value) -> Any:
        """A tensor that the step returns; if only its owners have it, a substitute that raises when read."""
        cut = self.compiled.cut
        if value.op in cut.program.leaf_ops:
            return self.batch.whole[cut.program.leaf_ops[value.op]]
        owners = cut.owners.get(value, ())
        if owners and self.compiled.worker not in owners:
            return AbsentResult(owners[0], cut.program.graph.spec(value))
        return self.values[value]


def _sum_weights(tensors: Sequence[Any]) -> Any:
    """The sum of all given weights: several calls in a step add up."""
    return tf.add_n([tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in tensors])
