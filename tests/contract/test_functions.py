"""tf.functions: which are called, and which are inlined."""

from typing import Any

import pytest
import tensorflow as tf

from tests.contract.tracing import record_calls, trace_graph
from whale_nebula.tf import private as tf_private


def test_PolymorphicFunction_calls_go_through_its_class() -> None:
    """`f()` looks `__call__` up on the class: hooking it there reaches functions, and methods of objects."""

    class Thing:
        @tf.function
        def method(self, x: Any) -> Any:
            return x

    thing, alone = Thing(), tf.function(tf.identity)
    with record_calls(tf_private.PolymorphicFunction, "__call__") as called:
        thing.method(1.0), alone(1.0)
    assert [function.python_function.__name__ for function, *_ in called] == ["method", "identity"]


def test_is_compiled_by_xla_and_can_inline_by_kind_of_function() -> None:
    plain, compiled = tf.function(tf.identity), tf.function(tf.identity, jit_compile=True)
    named = tf.function(tf.identity, experimental_implements="tests.own")
    assert [tf_private.is_compiled_by_xla(f) for f in (plain, compiled)] == [False, True]
    assert [tf_private.can_inline(f) for f in (plain, named)] == [True, False]


@pytest.mark.parametrize("autograph", [True, False])
def test_run_inline_agrees_with_tracing(autograph: bool) -> None:
    """Defaults, casts to the signature, AutoGraph where it is on, and what is returned becomes tensors."""

    @tf.function(autograph=autograph, input_signature=[tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.int32)])
    def inner(x: Any, turns: Any = 3) -> Any:
        if autograph:
            for _ in tf.range(turns):
                x = x * 2.0
        return {"x": x, "three": 3, "none": None, "rank": turns.dtype.name == "int32"}

    found: dict[str, Any] = {}

    def outer() -> Any:
        found.update(tf_private.run_inline(inner, ([1.0, 2.0],), {}))
        return found["x"]

    graph = trace_graph(outer)
    assert {op.type for op in graph.get_operations()}.isdisjoint({"PartitionedCall", "StatefulPartitionedCall"})
    assert found["x"].dtype == tf.float64
    assert found["three"].dtype == tf.int32
    assert found["none"] is None
    assert tf.get_static_value(found["rank"])
    assert any("while" in op.type.lower() for op in graph.get_operations()) == autograph


def test_run_inline_creates_variables_once() -> None:
    made: list[tf.Variable] = []

    @tf.function
    def inner(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(2.0))
        return x * made[0]

    step = tf.function(lambda x: tf_private.run_inline(inner, (x,), {}), autograph=False)
    assert float(step(3.0)) == 6.0
    assert float(made[0]) == 2.0


def test_run_inline_draws_the_same_random_numbers() -> None:
    """Random ops without a seed are numbered by graph, and seeded by their number."""
    inner = tf.function(lambda: tf.random.uniform([2]))

    def outer(call: Any) -> Any:
        first = tf.random.uniform([2])
        return first, call(), tf.random.uniform([2])

    found = []
    for call in (inner, lambda: tf_private.run_inline(inner, (), {})):
        tf.random.set_seed(3)
        found.append([t.numpy().tolist() for t in tf.function(lambda call=call: outer(call), autograph=False)()])
    assert found[0] == found[1]


@pytest.mark.parametrize("silence", [tf_private.silence_retracing_warning, lambda function: function])
def test_silence_retracing_warning_of_tensorflow(silence: Any, caplog: pytest.LogCaptureFixture) -> None:
    def make_function() -> Any:
        def body(x: Any) -> Any:
            return x + 1

        return silence(tf.function(body, autograph=False))

    with caplog.at_level("WARNING", logger="tensorflow"):
        for _ in range(8):
            make_function()(tf.constant(1))
    assert ("retracing" in caplog.text) == (silence is not tf_private.silence_retracing_warning)
