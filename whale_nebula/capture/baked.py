"""A batch size that a trace holds as a constant: a reshape to [32, -1], where the number of rows is None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.capture.places import place_of
from whale_nebula.errors import StaticBatchError
from whale_nebula.passes.reduce.baked import free
from whale_nebula.tf import private as tf_private


class Baked(NamedTuple):
    """A reshape that gives rows a fixed number."""

    op: Any
    sizes: Sequence[int]

    @property
    def line(self) -> str:
        """Where the user wrote it."""
        return str(place_of(self.op))

    @property
    def mend(self) -> str:
        """What to write there."""
        return f"tf.reshape(x, {free(self.sizes, self.op.inputs[0].shape.as_list())})"

    def error(self) -> StaticBatchError:
        """What a trace fails with that needs to know what the reshape leaves unknown."""
        return StaticBatchError(
            f"a batch size is baked in: rows are reshaped to {list(self.sizes)}",
            where=f"{self.op.name} (Reshape), {self.line}",
            why="the batch's first axis is captured as None, and what the reshape leaves of the others is unknown",
            mend=self.mend,
        )


def baked_reshape(graph: Any) -> Baked | None:
    """The first reshape of a traced graph that gives rows a fixed number, if there is one; gradients follow it."""
    for op in graph.get_operations() if graph is not None else []:
        own = op.type == "Reshape" and tf_private.forward_op(op) is op
        if own and op.inputs[0].shape.rank and op.inputs[0].shape[0] is None:
            sizes = _sizes(op.inputs[1])
            if sizes and sizes[0] > 1:
                return Baked(op, sizes)
    return None


def _sizes(tensor: Any) -> list[int]:
    value = tf.get_static_value(tensor)
    return [] if value is None else [int(size) for size in value]
