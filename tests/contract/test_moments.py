"""Synchronized moments: Keras computes them by one function, which this package replaces."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.contract.tracing import VECTOR, trace_graph
from whale_nebula.tf import patch as tf_patch
from whale_nebula.tf import private as tf_private

X = np.random.default_rng(0).random((6, 3), "float32")
MARK = "_nebula_mark"


def compute_moments(**options: Any) -> list[np.ndarray]:
    layer = keras.layers.BatchNormalization(momentum=0.0, **options)
    layer(X, training=True)
    return [variable.numpy() for variable in layer.non_trainable_variables]


def test_patch_moments_replaces_synchronized_moments_only() -> None:
    asked: list[tuple[Sequence[int], bool]] = []

    def answer(x: Any, axes: Sequence[int], keepdims: bool) -> tuple[Any, Any]:
        asked.append((tuple(axes), keepdims))
        return tf.fill([3], 7.0), tf.fill([3], 9.0)

    with tf_patch.patch_moments(answer).apply():
        plain, ours = compute_moments(), compute_moments(synchronized=True)
    assert asked == [((0,), False)]
    np.testing.assert_allclose(plain, [X.mean(0), X.var(0)], rtol=1e-5)
    np.testing.assert_array_equal(ours, [[7.0] * 3, [9.0] * 3])


def test_patch_moments_falls_back_to_keras() -> None:
    with tf_patch.patch_moments(lambda x, axes, keepdims: None).apply():
        found = compute_moments(synchronized=True)
    np.testing.assert_allclose(found, [X.mean(0), X.var(0)], rtol=1e-4)
    np.testing.assert_array_equal(found, compute_moments(synchronized=True))


def test_remove_attribute_of_an_op() -> None:
    def body(x: Any) -> Any:
        with tf_private.stamp_ops(tf.compat.v1.get_default_graph(), {MARK: 1}):
            marked = tf.identity(x)
        assert tf_private.read_number_stamp(marked.op, MARK) == 1
        tf_patch.remove_attribute(marked.op, MARK)
        return marked

    graph = trace_graph(body, VECTOR)
    assert all(MARK not in node.attr for node in graph.as_graph_def().node)


def test_list_readers_returns_input_positions() -> None:
    def body(x: Any) -> Any:
        doubled = x + x
        assert [(op.type, place) for op, place in tf_patch.list_readers(x)] == [("AddV2", 0), ("AddV2", 1)]
        return doubled

    trace_graph(body, VECTOR)
