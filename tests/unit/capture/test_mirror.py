"""A traced graph as pure data: cases beyond the golden programs."""

from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import mirror, order_operations


def traced(fn: Any, *specs: Any) -> Any:
    return tf.function(fn, autograph=False).get_concrete_function(*specs).graph


VECTOR = tf.TensorSpec([None, 3], tf.float32)


def test_an_op_never_comes_before_its_inputs() -> None:
    """Differentiating a loop gives the loop inputs that were traced after it."""

    def fn(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.sin(v)), [0, x])[1]
        return tape.gradient(y, x)

    ordered = order_operations(traced(fn, VECTOR).get_operations())
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
