"""A tf.function that a step calls is inlined in the thread that traces, and nowhere else."""

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.patches import trace_patched
from whale_nebula.errors import BoundaryInBodyError

ROWS = np.ones((4, 2), "float32")


def sine(x: Any) -> Any:
    return tf.sin(x)


def calls(step: Any, *args: Any) -> int:
    """The calls that are left in a captured step."""
    program = step.step.plan(*step.arguments(*args)).cut.program
    return sum(op.type.endswith("PartitionedCall") for op in program.graph.ops)


def around(inner: Any) -> Any:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return inner(x)

    return step


def test_what_is_called_becomes_part_of_the_step() -> None:
    assert calls(around(tf.function(sine)), tf.constant(ROWS)) == 0


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"experimental_implements": "tests.own"}])
def test_what_means_more_than_its_python_stays_a_call(options: dict[str, Any]) -> None:
    assert calls(around(tf.function(sine, **options)), tf.constant(ROWS)) == 1


def test_what_a_loop_calls_stays_in_its_body() -> None:
    inner = tf.function(sine)
    found = around(lambda x: tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, inner(v)), [0, x])[1])
    np.testing.assert_allclose(found(tf.constant(ROWS)), np.sin(np.sin(ROWS)), rtol=1e-6)


def test_another_thread_keeps_its_calls() -> None:
    inner, found = tf.function(sine), []
    with trace_patched():
        thread = threading.Thread(target=lambda: found.append(float(inner(0.0))))
        thread.start()
        thread.join(timeout=30)
    assert found == [0.0]
    assert inner.experimental_get_tracing_count() == 1


def test_a_scope_in_a_concrete_function_is_refused() -> None:
    """It is traced by itself before it is called, so it cannot be run inline."""

    @tf.function
    def inner(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return tf.sin(x)

    @nb.function
    def step(x: Any) -> Any:
        return inner.get_concrete_function(tf.TensorSpec([None, 2]))(x)

    with pytest.raises(BoundaryInBodyError, match=r"nested tf\.function"):
        step(ROWS)
