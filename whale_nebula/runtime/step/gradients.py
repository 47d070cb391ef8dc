"""Sums of gradients, in the order of micro-batches within a stage and then from the last stage to the first, for any
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.ir.graph import CAPTURE
from whale_nebula.ir.program import GradientPart, PartKey, Program
from whale_nebula.spec import Value


def merge(rule: str, values: Sequence[Any], shares: Sequence[Any]) -> Any:
    """The values of all micro-batches as one, by a rule of `Cut.merges`; `shares` are those of the micro-batches' rows.

    >>> float(merge("mean", [tf.constant(1.0), tf.constant(4.0)], [0.25, 0.75]))
    3.25
    """
    if len(values) == 1 or rule in ("only", "same"):
        return values[0]
    if rule == "last":
        return values[-1]
    if rule == "sum":
        return sum_in_order(values)
    if rule == "mean":
        return sum_in_order([value * tf.cast(share, value.dtype) for value, share in zip(values, shares, strict=True)])
    if rule.startswith("vector:"):
        rules = rule.partition(":")[2].split(",")
        flat = [tf.unstack(tf.reshape(value, [len(rules)])) for value in values]
        merged = [merge(each, pieces, shares) for each, *pieces in zip(rules, *flat, strict=True)]
        return tf.reshape(tf.stack(merged), tf.shape(values[0]))
    return tf.concat(values, int(rule.partition(":")[2] or 0))


def sum_in_order(values: Sequence[Any]) -> Any:
    """The sum in the given order, so that bits do not depend on the schedule."""
    first = values[0]
    for value in values[1:]:
        first = first + value
    return first


def _add(one: Any, other: Any) -> Any:
    """The sum of two gradients. The op costs a half of the operator, which other types than tensors need."""
    return tf.raw_ops.AddV2(x=one, y=other) if isinstance(one, tf.Tensor) else one + other


@dataclass
class GradientSums:
    """The gradients of one stage, added up over micro-batches."""

    program: Program
    dense: dict[PartKey, Any] = field(default_factory=dict)
    row_lists: dict[PartKey, list[tuple[Any, ...]]] = field(default_factory=dict)

    def add(self, request: int, part: GradientPart, tensors: Sequence[Any]) -> None:
        """Add one gradient part of a micro-batch: a tensor, or values and indices.

        Slices whose indices are the same in each micro-batch (positions) are added: the uncut step has each once, and
        an optimizer that squares slices would give a different result.
        """
        key = self.program.requests[request].key_of(part)
        if part.sparse and not part.concatenated and key in self.row_lists:
            self.row_lists[key] = [(self.row_lists[key][0][0] + tensors[0], tensors[1])]
        elif part.sparse or self._has_rows(request, part.source):
            self.row_lists.setdefault(key, []).append(tuple(tensors))
        elif key in self.dense and self._is_same(request, part.source):
            return
        elif key in self.dense:
            self.dense[key] = _add(self.dense[key], tensors[0])
        else:
            self.dense[key] = tensors[0]

    def _has_rows(self, request: int, source: int) -> bool:
        """Whether a gradient, of an input or an activation, has a row for each row of the batch, by the passes."""
        merges = self.program.requests[request].merges
        if merges:
            return merges[source] == "rows"
        origin = self.program.requests[request].origins[source]
        return origin >= 0 and self.program.graph.ops[origin].role != CAPTURE

    def _is_same(self, request: int, source: int) -> bool:
        """Whether a gradient is the same in every micro-batch, like that of a sum over the whole batch."""
        merges = self.program.requests[request].merges
        return bool(merges) and merges[source] == "same"

    def has_part(self, key: PartKey) -> bool:
        """Whether any micro-batch had this gradient."""
        return key in self.dense or key in self.row_lists

    def is_row_list(self, key: PartKey) -> bool:
        """Whether a gradient is the concatenated rows of micro-batches rather than a sum."""
        part = self.program.gradient_parts[key]
        return part.concatenated if part.sparse else self._has_rows(*key[:2])

    def pieces(self, key: PartKey, piece: int, turns: Sequence[int]) -> dict[int, Any]:
        """Tensor number `piece` of a gradient: that of each of the micro-batches `turns` if these are lists of rows,
        otherwise the sum of all under -1.
        """
        if self.is_row_list(key):
            return {m: columns[piece] for m, columns in zip(turns, self.row_lists[key], strict=True)}
        return {-1: self.row_lists[key][0][piece] if key in self.row_lists else self.dense[key]}

    def put(self, key: PartKey, rows: Sequence[tuple[Any, ...]]) -> None:
        """Replace the local gradient by that of all replicas: their rows, or the sum of theirs."""
        if self.is_row_list(key):
            self.row_lists[key] = list(rows)
        elif len(rows[0]) > 1:
            self.row_lists[key] = [(sum_in_order([row[0] for row in rows]), rows[0][1])]
        elif self._is_same(*key[:2]):
            self.dense[key] = rows[0][0]
        else:
            self.dense[key] = sum_in_order([row[0] for row in rows])

    def drop(self, request: int, source: int) -> None:
        """Drop the sums of the gradient with respect to a source."""
        for sums in (self.dense, self.row_lists):
            for key in [key for key in sums if key[:2] == (request, source)]:
                del sums[key]

    def parts(self) -> dict[PartKey, tuple[Any, ...]]:
        """The sums: one tensor, or values and indices."""
        found: dict[PartKey, tuple[Any, ...]] = {key: (tensor,) for key, tensor in self.dense.items()}
        for key, pieces in self.row_lists.items():
            found[key] = pieces[0] if len(pieces) == 1 else tuple(tf.concat(c, 0) for c in zip(*pieces, strict=True))
        return found


def sum_over_stages(program: Program, parts: dict[PartKey, tuple[Any, ...]]) -> dict[Value, Any]:
    """Add up the parts of each gradient over the stages that use its (tied) variable, by gradient placeholder."""
    by_source: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
    for key in sorted(parts, key=lambda key: (-key[2], key[3])):  # from the last stage, as backpropagation adds
        by_source.setdefault(key[:2], []).append(parts[key])
    found: dict[Value, Any] = {}
    for request in program.requests:
        for holder in request.holders:
            terms = by_source.get((request.index, holder.source))
            if terms:
                shape = _find_shape(program, request.origins[holder.source])
                found.update(zip(holder.values, _sum_parts(terms, holder.sparse, shape), strict=True))
    return found


def _sum_parts(parts: Sequence[tuple[Any, ...]], sparse: bool, shape: Sequence[int] | None) -> tuple[Any, ...]:
    if len(parts) == 1 and (len(parts[0]) > 1) == sparse:
        return parts[0]
    if sparse:
        kind = tf.int64 if len({part[1].dtype for part in parts}) > 1 else parts[0][1].dtype
        parts = [(values, tf.cast(indices, kind)) for values, indices in parts]
        return tuple(tf.concat(columns, 0) for columns in zip(*parts, strict=True))
    dense = [part[0] if len(part) == 1 else _to_dense(part, shape) for part in parts]
    return (sum_in_order(dense),)


def _to_dense(part: tuple[Any, ...], shape: Sequence[int] | None) -> Any:
    return tf.convert_to_tensor(tf.IndexedSlices(part[0], part[1], tf.constant(shape, tf.int64)))


def _find_shape(program: Program, origin: int) -> Sequence[int] | None:
    variable = program.variable_ops.get(origin)
    return None if variable is None else [axis or 0 for axis in variable.spec.shape or ()]
