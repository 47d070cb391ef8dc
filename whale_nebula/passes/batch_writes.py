"""Writes of values of the batch: which of them micro-batches can make in turn, at the top level and in bodies."""

from __future__ import annotations

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.effects import is_seeded_draw
from whale_nebula.passes.rules import ROWS, WHOLE, Fold, Folding
from whale_nebula.passes.rules.interpret import BodyWrite
from whale_nebula.passes.rules.registry import COUNT, SUM
from whale_nebula.spec import Value

_ACCUMULATIONS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})
_ADDITIONS = frozenset({"AddV2", "Add", "Sub"})
_ASSIGNMENTS = ("Assign", "ResourceStridedSliceAssign")


def find_addend(graph: Graph, write: Op) -> Value | None:
    """The value that a write adds to its variable or subtracts from it; Keras assigns the sum of a
    read and that value.
    """
    if write.type in _ACCUMULATIONS:
        return write.inputs[1]
    made = _skip_identities(graph, write.inputs[1]) if write.type == "AssignVariableOp" else write
    for place, value in enumerate(made.inputs if made.type in _ADDITIONS else ()):
        read = _skip_identities(graph, value)
        if read.type == "ReadVariableOp" and read.inputs[0] == write.inputs[0] and not (place and made.type == "Sub"):
            return made.inputs[1 - place]
    return None


def _skip_identities(graph: Graph, value: Value) -> Op:
    op = graph.ops[value.op]
    return _skip_identities(graph, op.inputs[0]) if op.type == "Identity" else op


def explain_write(op: Op, inputs: list[Fold]) -> str | None:
    """The reason why a write cannot be made by micro-batches in sequence, independent of its values."""
    kinds = {state.kind for state in inputs}
    if ROWS in kinds and op.type.startswith(_ASSIGNMENTS):
        return (
            "rows of the batch are assigned to a variable, and each micro-batch would overwrite them with its own rows"
        )
    if any(state.position for state in inputs):
        return "it writes at positions given by row numbers, and each micro-batch numbers its rows from zero"
    if ROWS in kinds and op.type.startswith("ResourceScatter") and not kinds <= {ROWS, WHOLE}:
        return "rows of the batch determine where it writes, and the written value depends on all rows"
    return None


def adds_up(op: Op, folding: Folding) -> bool:
    """Whether micro-batches can make all writes in the bodies of an op in turn: each adds its part of a sum, or writes
    its own rows.
    """
    writes = folding.body_writes.get(op.index, ())
    return bool(writes) and all(_explain(each) is None for each in writes)


def explain_body_writes(op: Op, folding: Folding) -> str | None:
    """The reason why micro-batches cannot make the writes in the bodies of an op in turn. Seeds of random draws advance
    with each.
    """
    found = (each for each in folding.body_writes.get(op.index, ()) if not _writes_seed(each))
    return next((reason for each in found if (reason := _explain(each))), None)


def _writes_seed(write: BodyWrite) -> bool:
    """Whether a write does not depend on the batch, and random numbers are drawn beside it."""
    return all(fold.kind == WHOLE for fold in write.inputs) and any(map(is_seeded_draw, write.body.ops))


def _explain(write: BodyWrite) -> str | None:
    addend = find_addend(write.body, write.op)
    if addend is not None and write.folds[addend].kind in (SUM, COUNT):
        return None
    if not write.op.type.startswith(_ASSIGNMENTS) and any(fold.kind == ROWS for fold in write.inputs):
        return explain_write(write.op, write.inputs)
    return "a branch or loop writes to a variable, and each micro-batch would write a value of its own"
