"""A traced graph as pure data."""

from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import COMPRESS, STAGE, in_order, mirror
from whale_nebula.tf.private import stamp_ops


def traced(fn: Any, *specs: Any) -> Any:
    return tf.function(fn, autograph=False).get_concrete_function(*specs).graph


VECTOR = tf.TensorSpec([None, 3], tf.float32)


def test_stamps_become_fields_and_are_no_attributes() -> None:
    def fn(x: Any) -> Any:
        with stamp_ops(tf.compat.v1.get_default_graph(), {STAGE: "a", COMPRESS: 2}):
            return tf.sin(x)

    sin = next(op for op in mirror(traced(fn, VECTOR)).ops if op.type == "Sin")
    assert (sin.stage, sin.compress) == ("a", 2)
    assert STAGE not in sin.attributes


def test_small_whole_numbers_are_known_and_large_ones_are_not() -> None:
    graph = mirror(traced(lambda x: (tf.reshape(x, [-1, 1, 3]), x + tf.ones((100, 3))), VECTOR))
    constants = [op.constant for op in graph.ops if op.type == "Const"]
    assert (-1, 1, 3) in constants
    assert None in constants


def test_bodies_are_mirrored_once() -> None:
    inner = tf.function(lambda v: tf.cos(v))
    graph = mirror(traced(lambda x: inner(x) + inner(x), VECTOR))
    calls = [op for op in graph.ops if op.functions]
    assert len({name for op in calls for name in op.functions}) == 1
    assert "Cos" in {op.type for op in graph.functions[calls[0].functions[0]].ops}


def test_an_op_never_comes_before_its_inputs() -> None:
    """Differentiating a loop gives the loop inputs that were traced after it."""

    def fn(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.sin(v)), [0, x])[1]
        return tape.gradient(y, x)

    ordered = in_order(traced(fn, VECTOR).get_operations())
    place = {op: number for number, op in enumerate(ordered)}
    assert all(place[tensor.op] < place[op] for op in ordered for tensor in op.inputs)


def test_a_body_may_call_what_only_a_graph_around_it_knows() -> None:
    """So TensorFlow wraps a condition under a persistent tape."""

    def fn(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sin(x), lambda: x)
        return tape.gradient(y, x)

    graph = mirror(traced(fn, VECTOR))
    assert "Sin" in {op.type for body in graph.functions.values() for op in body.ops}


def test_a_body_may_call_functions_of_the_old_kind() -> None:
    """So tf.nn.ctc_loss loops: by functions of TensorFlow 1, which are ops of their own."""

    def fn(x: Any) -> Any:
        ones = tf.ones([tf.shape(x)[0]], tf.int32)
        return tf.nn.ctc_loss(ones[:, None], x, ones, 3 * ones, logits_time_major=False, blank_index=0)

    graph = mirror(traced(fn, tf.TensorSpec([None, 3, 4], tf.float32)))
    loops = [op for op in _all(graph) if op.type == "While"]
    assert loops and all(len(op.functions) == 2 for op in loops)


def _all(graph: Any) -> list[Any]:
    return [*graph.ops, *(op for body in graph.functions.values() for op in body.ops)]
