"""Bucketed all-reduce of gradients by TensorFlow's collectives, overlapped with the last micro-batch's backward.

The sums are ops of the function that computes the last micro-batch of a replica: so the gradients of the last layers
are on their way while those of the first ones are computed. Numbers that micro-batches gave (losses, counts) go with
them, in a table with a row for each micro-batch: nobody else has anything but zeros in that row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from whale_nebula.feed.batch import Batch
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.passes.exchange import ReplicaMessage
from whale_nebula.runtime.replicas.collectives import DTYPES, Collectives, Group, groups
from whale_nebula.runtime.step.compiled import Compiled, Piece
from whale_nebula.runtime.step.gradients import Sums
from whale_nebula.spec import Spec, Value


class Run(Protocol):
    """A stage in a step, as this file sees it: its micro-batches, its sums, and which of these are those of all."""

    stage: int
    turns: Sequence[int]
    batch: Batch
    sums: Sums
    kept: dict[Value, dict[int, Any]]
    added: set[ReplicaMessage]


@dataclass
class Added:
    """The groups of replicas, by stage; a group calls its sums by the number of the program."""

    cut: Cut
    groups: Mapping[int, Group]
    program: int
    _shapes: dict[ReplicaMessage, tuple[int, ...] | None] = field(default_factory=dict)
    _functions: dict[tuple[Fragment, bool], Any] = field(default_factory=dict)

    def takes(self, each: ReplicaMessage) -> bool:
        """Whether TensorFlow can add this up: a dense gradient of a form that the plan knows, or numbers."""
        if each.stage not in self.groups:
            return False
        if each.kind == "numbers":
            return all(_sum_dtype(spec) in DTYPES for spec in each.specs)
        if each not in self._shapes:
            self._shapes[each] = self._shape(each) if each.kind == "sum" else None
        return self._shapes[each] is not None

    def add(self, run: Run, told: Sequence[ReplicaMessage]) -> None:
        """Put what all replicas have in the place of what this one has, where it is not there yet. One that had no rows
        adds zeros.
        """
        chosen = [each for each in self._choose_order(told) if each not in run.added]
        if chosen:
            own = [tensor for each in chosen for tensor in self._own(run, each)]
            self._put(run, chosen, self.groups[run.stage].sum(own, self._name(run.stage, chosen[0])))

    def last(
        self, run: Run, piece: Piece, tensors: Sequence[Any], told: Sequence[ReplicaMessage], micro_batch: int
    ) -> dict[Value, Any]:
        """Run the last micro-batch of a replica and add up what all have; gives what else the piece gives."""
        chosen = self._choose_order(told)
        again = any(run.sums.has(each.key) for each in chosen if each.kind == "sum")
        before = [run.sums.dense[each.key] for each in chosen if each.kind == "sum"] if again else []
        tables = [table for each in chosen if each.kind == "numbers" for table in self._own(run, each)]
        key = piece.fragment, again
        if key not in self._functions:
            self._functions[key] = self._with_sums(run.stage, piece, chosen, again)
        function, rest = self._functions[key]
        with self.groups[run.stage].collectives.explained(f"the gradients of stage {run.stage}"):
            results = function(*tensors, *before, *tables, tf.constant(micro_batch))
        self._put(run, chosen, results[len(rest) :])
        return dict(zip(rest, results, strict=False))

    def fits(self, piece: Piece, told: Sequence[ReplicaMessage]) -> bool:
        """Whether a piece makes all of the gradients that are to be added up."""
        sums = [each for each in told if each.kind == "sum" and self.takes(each)]
        return bool(sums) and all(each.values[0] in piece.fetches for each in sums)

    def _with_sums(self, stage: int, piece: Piece, chosen: Sequence[ReplicaMessage], again: bool) -> Any:
        crossing = {flow.gradient for request in self.cut.program.requests for flow in request.flows}
        sums = [each for each in chosen if each.kind == "sum"]
        summed = {each.values[0] for each in sums} - crossing
        rest = [value for value in piece.fetches if value not in summed]
        count, name = len(piece.feeds), self._name(stage, chosen[0])

        def body(*tensors: Any) -> list[Any]:
            made = dict(zip(piece.fetches, piece.function(tensors[:count]), strict=True))
            more = iter(tensors[count:-1])
            own: list[Any] = []
            for each in sums:
                gradient = made[each.values[0]] if not again else next(more) + made[each.values[0]]
                own.append(tf.ensure_shape(gradient, self._shapes[each]))
            for each in chosen[len(sums) :]:
                own += [_with_row(next(more), group, made, tensors[-1]) for group in _groups(each).items()]
            return [*(made[value] for value in rest), *self.groups[stage].sum(own, name)]

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in piece.function.concrete.inputs[:count]]
        specs += [tf.TensorSpec(self._shapes[each], each.specs[0].dtype) for each in sums] if again else []
        specs += [self._table(group) for each in chosen[len(sums) :] for group in _groups(each).items()]
        specs.append(tf.TensorSpec([], tf.int32))
        return tf.function(body, input_signature=specs, autograph=False).get_concrete_function(), rest

    def _choose_order(self, told: Sequence[ReplicaMessage]) -> list[ReplicaMessage]:
        """Gradients of the last layers first, as they are there first; numbers at the end."""
        taken = [each for each in reversed(told) if self.takes(each)]
        return sorted(taken, key=lambda each: each.kind == "numbers")

    def _own(self, run: Run, each: ReplicaMessage) -> list[Any]:
        """What this replica adds."""
        if each.kind == "sum":
            return [run.sums.dense[each.key] if run.turns else tf.zeros(self._shapes[each], each.specs[0].dtype)]
        return [self._fill_table(run, group) for group in _groups(each).items()]

    def _fill_table(self, run: Run, group: Numbers) -> Any:
        """A table with the rows of the micro-batches that this replica has done."""
        table = np.zeros(self._table(group).shape, tf.as_dtype(group[0]).as_numpy_dtype)
        for column, value in enumerate(group[1]):
            for m, tensor in run.kept.get(value, {}).items():
                table[m, column] = np.asarray(tensor)
        return tf.constant(table)

    def _table(self, group: Numbers) -> tf.TensorSpec:
        return tf.TensorSpec([self.cut.program.pipeline.micro_batch, len(group[1])], group[0])

    def _put(self, run: Run, chosen: Sequence[ReplicaMessage], found: Sequence[Any]) -> None:
        given = iter(found)
        for each in chosen:
            run.added.add(each)
            if each.kind == "sum":
                run.sums.put(each.key, [(next(given),)])
                continue
            for _, values in _groups(each).items():
                self._told(run, values, next(given))

    def _told(self, run: Run, values: Sequence[Value], table: Any) -> None:
        rows = table.numpy()
        for column, value in enumerate(values):
            kind = tf.as_dtype(self.cut.program.graph.spec(value).dtype)
            run.kept[value] = {m: tf.constant(rows[m, column], kind) for m in range(len(run.batch.slices))}

    def _name(self, stage: int, first: ReplicaMessage) -> str:
        return f"{self.program} {stage} {first.slot}"

    def _shape(self, each: ReplicaMessage) -> tuple[int, ...] | None:
        """The form of a dense gradient; None where it is a list of rows, or the form is not known."""
        program, (request, source, *_) = self.cut.program, each.key
        part = program.gradient_parts[each.key]
        variable = program.variable_ops.get(program.requests[request].origins[source])
        shape = each.specs[0].shape if variable is None else variable.spec.shape
        dense = not part.sparse and variable is not None and each.specs[0].dtype in DTYPES
        if not dense or shape is None or None in shape:
            return None
        return tuple(axis for axis in shape if axis is not None)


Numbers = tuple[str, Sequence[Value]]
"""Numbers of one element type."""


def _sum_dtype(spec: Spec) -> str:
    """As which element type a number is added up."""
    return "int32" if spec.dtype == "bool" else spec.dtype


def _groups(each: ReplicaMessage) -> Mapping[str, list[Value]]:
    found: dict[str, list[Value]] = {}
    for value, spec in zip(each.values, each.specs, strict=True):
        found.setdefault(_sum_dtype(spec), []).append(value)
    return found


def _with_row(table: Any, group: Numbers, made: Mapping[Value, Any], micro_batch: Any) -> Any:
    """The table with the row of a micro-batch: what was made with it now, and what was there."""
    kind, values = group
    row = [tf.cast(made[value], kind) if value in made else table[micro_batch, n] for n, value in enumerate(values)]
    return tf.tensor_scatter_nd_update(table, [[micro_batch]], [tf.stack(row)])


def find_groups(compiled: Compiled, collectives: Collectives | None, program: int) -> Added | None:
    """The groups that this worker is in; None where TensorFlow's collectives are not to be had."""
    found = groups(compiled.cut, compiled.worker, collectives, f"program {program}")
    return Added(compiled.cut, found, program) if found else None
