"""How much a step's constants weigh: all of them together have to fit into one graph of TensorFlow's."""

from __future__ import annotations

from typing import Any

from whale_nebula.capture.places import place_of
from whale_nebula.errors import CaptureError

LIMIT = 2**31
MEND = (
    "hold it in a variable, tf.Variable(array, trainable=False), or give it as an argument: "
    "@nb.function(whole=('table',))"
)


def check_constants(graph: Any) -> None:
    """Refuse a traced graph whose constants are too large; the largest is named."""
    constants = [op for op in graph.get_operations() if op.type == "Const"]
    total = sum(map(_bytes, constants))
    if total >= LIMIT:
        largest = max(constants, key=_bytes)
        raise CaptureError(
            f"the constants of the step are {total / 1e9:.1f} GB",
            where=f"{largest.name} ({_bytes(largest) / 1e9:.1f} GB), {place_of(largest)}",
            why="constants are part of the traced graph, which holds 2 GB",
            mend=MEND,
        )


def _bytes(op: Any) -> int:
    tensor = op.outputs[0]
    return (tensor.shape.num_elements() or 0) * max(1, tensor.dtype.size)
