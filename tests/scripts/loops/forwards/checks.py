"""Forwards that check, print, or call Python."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.scripts.loops.forwards.forward_loop import make_forward_loop
from tests.scripts.loops.loop_scripts import Cut, Loop, chain, descend, mse, script, step_script, weights


@script()
def asserting(cut: Cut) -> Loop:
    w = weights()

    def first(x: Any) -> Any:
        tf.debugging.assert_equal(tf.shape(x)[1], 4)
        tf.debugging.assert_all_finite(x, "x")
        with tf.control_dependencies([tf.debugging.assert_less(tf.abs(x), 1e6)]):
            hidden = x @ w[0]
        return tf.debugging.check_numerics(tf.tanh(hidden), "hidden")

    return make_forward_loop(cut, first, w=w)


@step_script()
def printing(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape, cut.program():
        outputs = chain(cut, x, w)
        loss = mse(y, outputs)
    tf.print("loss", loss, tf.shape(outputs), output_stream="file:///dev/null")
    gradients = tape.gradient(loss, w)
    tf.print("norm", tf.linalg.global_norm(gradients), output_stream="file:///dev/null")
    descend(w, gradients)
    return loss


@script(micro=(1,))
def calling_python(cut: Cut) -> Loop:
    w = weights()

    def first(x: Any) -> Any:
        mask = tf.numpy_function(lambda a: (a > 0).astype("float32"), [x], tf.float32)
        doubled = tf.py_function(lambda a: 2.0 * a, [x @ w[0]], tf.float32)
        return tf.tanh(tf.ensure_shape(doubled, [None, 4])) * tf.ensure_shape(mask, [None, 4])

    return make_forward_loop(cut, first, w=w)
