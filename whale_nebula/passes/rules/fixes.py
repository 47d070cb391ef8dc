"""Three rewrites for inputs with which an op's rule alone would couple the rows or lose a sum.

Feed: a value of inputs only is computed for the whole batch. Grow: a differentiated value is multiplied by rows /
rows_m; a sum becomes a mean, and a number of rows that of the whole batch. Recount: a model output of which only the
shape is read is replaced by an input's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from whale_nebula.passes.rules.registry import (
    AFTER,
    COUNT,
    COUPLED,
    INVERSE,
    MEAN,
    ROWS,
    SUM,
    WHOLE,
    Fold,
    Node,
    transfer,
    whole,
)
from whale_nebula.spec import Spec, Value

_ONCE = frozenset({SUM, MEAN, INVERSE, AFTER, COUPLED})
_BADNESS = {AFTER: 1, COUPLED: 2}


class Edge(NamedTuple):
    """One input of one op."""

    consumer: int
    position: int
    value: Value


class Recount(NamedTuple):
    """A read of the shape of a model's output, to be replaced by `sizes`, in which None is the count of rows along
    `axis` of `rows`.
    """

    edge: Edge
    rows: Value
    axis: int
    sizes: tuple[int | None, ...]


Outcome = tuple[Fold, ...]
FED = whole()._replace(inputs=True)
"""The state of a value that is computed for the whole batch."""


def feed(node: Node, outcome: Outcome, asked: set[Value], *, always: bool, apart: bool) -> tuple[Node, Outcome]:
    """Read values of inputs alone as computed for the whole batch: always, or if that is better.

    If micro-batches may be `apart`, a coupled value may consist of rows: then its size is unknown, and each micro-batch
    has its own.
    """
    places = [
        place
        for place, fold in enumerate(node.folds)
        if fold.inputs and (fold.kind in _ONCE or (fold.kind == COUNT and node.spec(place).floating))
        if not (apart and fold.kind == COUPLED and _lacks_sizes(node.spec(place)))
    ]
    if not places:
        return node, outcome
    mended, better = _try_fix(node, places, lambda _: FED)
    if not always and badness(better) >= badness(outcome):
        return node, outcome
    asked.update(node.op.inputs[place] for place in places)
    return mended, better


def _lacks_sizes(spec: Spec) -> bool:
    return spec.shape is None or None in spec.shape


def list_check_inputs(node: Node) -> list[Value]:
    """The inputs of an assertion that should be those of the whole batch: scalars that depend on inputs only.

    An assertion on all rows can be made in each micro-batch, which the error then names.
    """

    def for_all(fold: Fold) -> bool:
        return fold.kind == COUPLED and 0 <= fold.blame < len(node.graph) and node.graph.ops[fold.blame].type == "All"

    folds = zip(node.op.inputs, node.folds, strict=True)
    return [value for value, fold in folds if fold.inputs and fold.kind in _ONCE and not for_all(fold)]


def recount(node: Node, recounts: list[Recount]) -> Node:
    """Replace the number of rows in reshapes of inputs by their own, so that the result depends on inputs only."""
    if node.op.type != "Reshape" or not node.folds[0].inputs or node.folds[1].inputs:
        return node
    data, parts = node.folds[0], node.parts(1)
    sizes = None if data.kind != ROWS or parts is None else tuple(_size_asked_for(part, data.per) for part in parts)
    if sizes is None or sizes.count(None) != 1 or sizes.count(-1) > 1:
        return node
    rows, shape = node.op.inputs
    recounts.append(Recount(Edge(node.op.index, 1, shape), rows, data.axis, sizes))
    return replace(node, folds=(data, node.folds[1]._replace(inputs=True)))


def _size_asked_for(part: Fold, per: int) -> int | None:
    """A size of a shape: -1 if unknown, None if it counts rows like the data."""
    if part.kind == COUNT and part.per == per > 0:
        return None
    return int(part.literal[0]) if part.kind == WHOLE and part.literal is not None else -1


def countable(node: Node) -> tuple[int | None, ...] | None:
    """The sizes of a model's output if an op reads only these, the rows as None; None if one is unknown.

    An example is Keras's mask of a `Concatenate` of a masked and an unmasked tensor: ones of the size of the latter.
    """
    if node.op.type not in SHAPED:
        return None
    data, shape = node.folds[0], node.spec(0).shape
    if data.inputs or data.kind != ROWS or data.per != 1 or data.order or data.ragged or shape is None:
        return None
    sizes = tuple(None if axis == data.axis else size for axis, size in enumerate(shape))
    return sizes if sizes.count(None) == 1 else None


SHAPED = frozenset({"Shape", "ZerosLike", "OnesLike"})
"""Ops that read only the shape of a tensor."""


def grow(node: Node, outcome: Outcome, edges: list[Edge]) -> Outcome:
    """Multiply counts, sums or both by rows / rows_m, as a last resort."""
    for kinds in ({COUNT}, {SUM}, {COUNT, SUM}):
        places = [at for at, fold in enumerate(node.folds) if fold.kind in kinds and node.spec(at).floating]
        if not places or badness(outcome) == 0:
            continue
        mended, better = _try_fix(node, places, lambda fold: whole() if fold.kind == COUNT else Fold(MEAN))
        if badness(better) < badness(outcome):
            edges.extend(Edge(node.op.index, place, node.op.inputs[place]) for place in places)
            node, outcome = mended, better
    return outcome


def badness(outcome: Sequence[Fold]) -> int:
    """The worst state as a number: 0 can be merged, 1 must be computed from merged values, 2 is coupled."""
    return max((_BADNESS.get(fold.kind, 0) for fold in outcome), default=0)


def _try_fix(node: Node, places: Sequence[int], mend: Callable[[Fold], Fold]) -> tuple[Node, Outcome]:
    """Apply the rule again with some inputs changed."""
    folds = tuple(mend(fold) if place in places else fold for place, fold in enumerate(node.folds))
    mended = replace(node, folds=folds)
    return mended, transfer(mended)
