"""An update finishes one large variable before it begins the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from whale_nebula.capture.mirror import mirror
from whale_nebula.ir.graph import Graph
from whale_nebula.runtime.step.compiled import order_updates

WIDE, NARROW = (512, 1024), (4,)


def trace_update(optimizer: Any, shapes: list[tuple[int, ...]]) -> tuple[Graph, list[int], list[int]]:
    """Trace an optimizer for variables of these shapes; return the graph, the ops of the update, and the op that writes
    each variable last.
    """
    variables = [keras.Variable(tf.zeros(shape), name=f"v{number}") for number, shape in enumerate(shapes)]
    optimizer.build(variables)

    def update(*gradients: Any) -> None:
        optimizer.apply(gradients, variables)

    traced = tf.function(update, autograph=False).get_concrete_function(*map(tf.TensorSpec, shapes)).graph
    graph = mirror(traced)
    names = {id(external): internal.op.name for external, internal in traced.captures}
    held = [names[id(variable.value.handle)] for variable in variables]
    writes = {graph.ops[op.inputs[0].op].name: op.index for op in graph.ops if op.type.startswith("Assign")}
    ops = [op.index for op in graph.ops if op.type not in ("Placeholder", "NoOp")]
    return graph, ops, [writes[name] for name in held]


@pytest.mark.parametrize(
    "make",
    [keras.optimizers.Adam, keras.optimizers.AdamW, lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
     keras.optimizers.SGD, keras.optimizers.RMSprop, lambda: keras.optimizers.Adam(clipnorm=1.0)],
    ids=["adam", "adamw", "momentum", "sgd", "rmsprop", "clipped"],
)  # fmt: skip
def test_large_variables_are_updated_one_after_the_other(make: Callable[[], Any]) -> None:
    graph, ops, (first, small, second, third) = trace_update(make(), [WIDE, NARROW, WIDE, WIDE])
    waits = order_updates(graph, ops)
    assert set(waits.values()) == {first, second}
    before = {
        write: graph.add_control_inputs(waits).ascend([write]) & waits.keys() for write in (first, small, second, third)
    }
    assert not before[first] and not before[small]
    assert {waits[op] for op in before[second]} == {first} and {waits[op] for op in before[third]} == {second}
    for previous, write in ((first, second), (second, third)):  # no large tensor for it is computed before
        late = graph.add_control_inputs(waits).descend([previous], control=True)
        made = [graph.ops[op] for op in graph.ascend([write]) - late if graph.ops[op].outputs]
        assert {op.type for op in made if op.outputs[0].nbytes() >= 1 << 20} <= {"Placeholder", "IdentityN"}


def test_global_norm_is_not_delayed() -> None:
    """A norm of all gradients comes before any write."""
    graph, ops, _ = trace_update(keras.optimizers.Adam(global_clipnorm=1.0), [WIDE, WIDE])
    waits = order_updates(graph, ops)
    norm = next(op.index for op in graph.ops if op.type == "Sqrt")
    assert waits and not graph.ascend([norm]) & waits.keys()


def test_updates_of_small_variables_are_not_ordered() -> None:
    graph, ops, _ = trace_update(keras.optimizers.Adam(), [NARROW, NARROW])
    assert order_updates(graph, ops) == {}
    assert graph.add_control_inputs({}) is graph
