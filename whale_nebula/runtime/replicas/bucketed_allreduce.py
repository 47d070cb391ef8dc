"""Bucketed all-reduce of gradients with TensorFlow's collectives, overlapped with the backward of the last micro-batch;
if replicas hold slots in parts, a reduce-scatter.

The sums are ops of the function that computes the last micro-batch of a replica, so that gradients of the last layers
are sent while those of the first ones are computed. All other messages between replicas use links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.layout import SPLIT, find_local_spec
from whale_nebula.passes.exchange import ReplicaMessage
from whale_nebula.passes.replicas import has_one_order
from whale_nebula.runtime.replicas.collectives import DTYPES, Collectives, Group, make_groups
from whale_nebula.runtime.step.compiled import BoundFunction, Compiled
from whale_nebula.runtime.step.gradients import GradientSums
from whale_nebula.spec import Spec, Value


class SummedStage(Protocol):
    """The interface of a stage in a step: its micro-batches (`turns`), its sums, and which of them are summed over all
    replicas.
    """

    stage: int
    turns: Sequence[int]
    sums: GradientSums
    summed_messages: set[ReplicaMessage]


@dataclass
class BucketedAllReduce:
    """The all-reduces of a worker's gradients. `groups` are those of the replicas, by stage; names of sums contain the
    number of the `program`.
    """

    cut: Cut
    groups: Mapping[int, Group]
    program: int
    worker: str = ""
    _shapes: dict[ReplicaMessage, tuple[int, ...] | None] = field(default_factory=dict)
    _functions: dict[tuple[Fragment, bool], Any] = field(default_factory=dict)

    def can_sum(self, each: ReplicaMessage) -> bool:
        """Whether TensorFlow's collectives can sum a message: a dense gradient of known shape."""
        if each.kind != "sum" or each.stage not in self.groups:
            return False
        if each not in self._shapes:
            self._shapes[each] = self._find_shape(each)
        return self._shapes[each] is not None

    def sum_remaining(self, run: SummedStage, messages: Sequence[ReplicaMessage]) -> None:
        """Replace this replica's gradients by the sums over all replicas, except those that `run_last` has summed. A
        replica without micro-batches adds zeros.
        """
        chosen = [each for each in self._choose_messages(run.stage, messages) if each not in run.summed_messages]
        if chosen:
            empty = not run.turns
            own = [
                tf.zeros(self._shapes[each], each.specs[0].dtype) if empty else run.sums.dense[each.key]
                for each in chosen
            ]
            self._store_sums(run, chosen, self._sum_gradients(run.stage, own, chosen))

    def run_last(
        self, run: SummedStage, piece: BoundFunction, tensors: Sequence[Any], messages: Sequence[ReplicaMessage]
    ) -> dict[Value, Any] | None:
        """Run a piece on the last micro-batch of a replica, and sum the replicas' gradients in the same function.
        Returns the other outputs of the piece; None, without running it, if it does not compute all of the gradients.
        """
        chosen = self._choose_messages(run.stage, messages)
        if not chosen or any(each.values[0] not in piece.fetches for each in chosen):
            return None
        has_sums = any(run.sums.has_part(each.key) for each in chosen)
        before = [run.sums.dense[each.key] for each in chosen] if has_sums else []
        key = piece.fragment, has_sums
        if key not in self._functions:
            self._functions[key] = self._add_sums(run.stage, piece, chosen, has_sums)
        function, rest = self._functions[key]
        with self.groups[run.stage].collectives.explain_failures(f"the gradients of stage {run.stage}"):
            results = function(*tensors, *before)
        self._store_sums(run, chosen, results[len(rest) :])
        return dict(zip(rest, results, strict=False))

    def _add_sums(self, stage: int, piece: BoundFunction, chosen: Sequence[ReplicaMessage], has_sums: bool) -> Any:
        crossing = {flow.gradient for request in self.cut.program.requests for flow in request.flows}
        summed = {each.values[0] for each in chosen} - crossing
        rest = [value for value in piece.fetches if value not in summed]
        count = len(piece.feeds)

        def body(*tensors: Any) -> list[Any]:
            made = dict(zip(piece.fetches, piece.function(tensors[:count]), strict=True))
            own = [made[each.values[0]] for each in chosen]
            if has_sums:
                own = [before + gradient for before, gradient in zip(tensors[count:], own, strict=True)]
            own = [tf.ensure_shape(tensor, self._shapes[each]) for tensor, each in zip(own, chosen, strict=True)]
            return [*(made[value] for value in rest), *self._sum_gradients(stage, own, chosen)]

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in piece.function.concrete.inputs[:count]]
        specs += [tf.TensorSpec(self._shapes[each], each.specs[0].dtype) for each in chosen] if has_sums else []
        return tf.function(body, input_signature=specs, autograph=False).get_concrete_function(), rest

    def _choose_messages(self, stage: int, messages: Sequence[ReplicaMessage]) -> list[ReplicaMessage]:
        """The messages of a stage to sum: gradients of the last layers first, because they are computed first."""
        return [each for each in reversed(messages) if each.stage == stage and self.can_sum(each)]

    def _store_sums(self, run: SummedStage, chosen: Sequence[ReplicaMessage], found: Sequence[Any]) -> None:
        for each, tensor in zip(chosen, found, strict=True):
            run.summed_messages.add(each)
            run.sums.put(each.key, [(tensor,)])

    def _sum_gradients(self, stage: int, own: Sequence[Any], chosen: Sequence[ReplicaMessage]) -> list[Any]:
        """The sums of gradients over all replicas; for gradients that the plan divides, the piece of this replica."""
        layouts = self.cut.layouts.get(stage)
        pieces = {each.value: each.target.axis for each in layouts.sums if each.target.kind == SPLIT} if layouts else {}
        axes = [pieces.get(each.values[0]) for each in chosen]
        return self.groups[stage].sum(own, f"{self.program} {stage} {chosen[0].slot}", axes)

    def _find_shape(self, each: ReplicaMessage) -> tuple[int, ...] | None:
        """The shape of a dense gradient, or of this worker's piece; None if collectives cannot sum it."""
        program, (request, source, *_) = self.cut.program, each.key
        part = program.gradient_parts[each.key]
        variable = program.variable_ops.get(program.requests[request].origins[source])
        shape = each.specs[0].shape if variable is None else variable.spec.shape
        dense = not part.sparse and variable is not None and each.specs[0].dtype in DTYPES
        if not dense or shape is None or None in shape:
            return None
        layouts = self.cut.layouts.get(each.stage)
        if layouts is not None and layouts.returns_pieces(each.values[0]):
            index = self.cut.group_of(each.stage, self.worker).index(self.worker)
            spec = Spec(each.specs[0].dtype, shape)
            shape = find_local_spec(spec, layouts.layout(each.values[0]), layouts.count, index).shape or ()
        elif not has_one_order(self.cut, each.stage):
            return None
        return tuple(axis for axis in shape if axis is not None)


def make_bucketed_allreduce(
    compiled: Compiled, collectives: Collectives | None, program: int
) -> BucketedAllReduce | None:
    """The all-reduces of this worker; None if it runs no replicated stage, or if TensorFlow's collectives are not
    available.
    """
    found = make_groups(compiled.cut, compiled.worker, collectives, f"program {program}")
    return BucketedAllReduce(compiled.cut, found, program, compiled.worker) if found else None
