"""Gradient tapes: persistent, several, with manual watching, nested."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import whale_nebula as nb
from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    descend,
    loss_script,
    mse,
    script,
    step_script,
    train_loop,
    two_layers,
    weights,
)


@step_script(4)
def persistent_two_losses(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """An auxiliary loss on the middle; each loss moves its own variables."""
    with tf.GradientTape(persistent=True) as tape, cut.program():
        with cut.at(0):
            hidden = tf.tanh(x @ w[0])
        with cut.at(1):
            hidden = tf.tanh(hidden @ w[1])
            auxiliary = mse(y, hidden @ w[3])
        with cut.at(2):
            loss = mse(y, hidden @ w[2])
    main = tape.gradient(loss, w[:3])
    other = tape.gradient(auxiliary, [w[0], w[3]])
    descend(w, [main[0] + 0.5 * other[0], main[1], main[2], other[1]])
    return loss, auxiliary


@step_script()
def list_of_losses(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape, cut.program():
        outputs = chain(cut, x, w)
        losses = [
            mse(y, outputs),
            0.1 * tf.reduce_sum(outputs**2),
            0.1 * outputs,
            0.01 * tf.add_n([tf.nn.l2_loss(v) for v in w]),
        ]
    gradients = tape.gradient(losses, w)
    descend(w, gradients)
    return losses, gradients


@step_script(grid_only=True)
def watched_by_hand(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape(watch_accessed_variables=False) as tape, cut.program():
        tape.watch([w[0], w[2]])
        loss = mse(y, chain(cut, x, w))
    gradients = tape.gradient(loss, w, unconnected_gradients="zero")
    descend(w, gradients)
    return loss, gradients


@step_script()
def watched_variables(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """Whatever the tape has seen, in the order in which it saw it."""
    with tf.GradientTape() as tape, cut.program():
        loss = mse(y, chain(cut, x, w))
    variables = tape.watched_variables()
    gradients = tape.gradient(loss, variables)
    descend(variables, gradients)
    return loss, gradients


@step_script()
def asked_inside_the_block(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """The tape is asked, and the update made, while its block is still open."""
    with cut.program(), tf.GradientTape() as tape:
        loss = mse(y, chain(cut, x, w))
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
    return loss, gradients


@step_script()
def recording_stopped(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """What is computed while the tape has stopped is a constant to it."""
    with tf.GradientTape() as tape, cut.program():
        with cut.at(0):
            hidden = tf.tanh(x @ w[0])
            with tape.stop_recording():
                frozen = tf.sin(x @ w[0])
        with cut.at(1):
            hidden = tf.tanh((hidden + frozen) @ w[1])
        with cut.at(2):
            loss = mse(y, hidden @ w[2])
    gradients = tape.gradient(loss, w)
    descend(w, gradients)
    return loss, gradients


@loss_script()
def penalty_in_a_stage(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """WGAN-GP: the slope of the scores, inside the last part."""
    hidden = two_layers(cut, x, w)
    with cut.at(2):
        with tf.GradientTape() as inner:
            inner.watch(hidden)
            scores = tf.tanh(hidden @ w[2])
        slopes = inner.gradient(scores, hidden)
        norm = tf.sqrt(tf.reduce_sum(slopes**2, axis=1) + 1e-8)
        return tf.reduce_mean(scores * y) + tf.reduce_mean((norm - 1.0) ** 2)


@loss_script()
def penalty_across_stages(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """The slope of the scores with respect to the step's own input, through all stages."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        scores = tf.tanh(chain(cut, x, w))
    slopes = inner.gradient(scores, x)
    norm = tf.sqrt(tf.reduce_sum(slopes**2, axis=1) + 1e-8)
    return tf.reduce_mean(scores * y) + tf.reduce_mean((norm - 1.0) ** 2)


@loss_script()
def second_order_in_a_stage(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """A Hessian-vector product of what the last part does."""
    hidden = two_layers(cut, x, w)
    with cut.at(2):
        with tf.GradientTape(persistent=True) as middle:
            middle.watch(hidden)
            with tf.GradientTape() as inner:
                inner.watch(hidden)
                energy = tf.reduce_sum(tf.sin(hidden @ w[2]), axis=1)
            force = inner.gradient(energy, hidden)
            along = tf.reduce_sum(force * y, axis=1)
        curve = middle.gradient(along, hidden)
        return tf.reduce_mean(curve**2) + tf.reduce_mean(energy)


@loss_script()
def inner_gradient_as_a_value(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """Physics-informed: the network's slope at its input is part of the output; asked inside one stage."""
    with cut.at(0):
        with tf.GradientTape() as inner:
            inner.watch(x)
            hidden = tf.tanh(x @ w[0])
        slope = inner.gradient(hidden, x)
    with cut.at(1):
        hidden = tf.tanh((hidden + slope) @ w[1])
    with cut.at(2):
        return mse(y, hidden @ w[2])


@step_script(micro=(1,))
def adversarial_example(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """FGSM: the first tape asks for the slope at the input, the second trains on the moved input."""
    with cut.program():
        with tf.GradientTape() as tape:
            tape.watch(x)
            clean = mse(y, chain(cut, x, w))
        slope = tape.gradient(clean, x)
        moved = x + 0.1 * tf.sign(slope)
        with tf.GradientTape() as tape:
            loss = mse(y, chain(cut, moved, w))
        gradients = tape.gradient(loss, w)
    descend(w, gradients)
    return clean, loss, gradients


@step_script(stages=(2, 3), micro=(1,), passes=2)
def meta_learning(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """MAML: an inner step by hand, and the outer gradient through it.

    The second pass goes through stages with names of their own, on the same clusters.
    """
    with tf.GradientTape() as outer, cut.program():
        with tf.GradientTape() as inner:
            first = mse(y, chain(cut, x, w))
        slopes = inner.gradient(first, w)
        fast = [v - 0.1 * g for v, g in zip(w, slopes, strict=True)]
        loss = mse(y, chain(again(cut), x, fast))
    gradients = outer.gradient(loss, w)
    descend(w, gradients)
    return first, loss, gradients


def again(cut: Cut) -> Any:
    """The same cut, with stages for a second pass."""

    class Again:
        def at(self, third: int) -> Any:
            cluster = (0, cut.stages > 1, cut.stages - 1)[third]
            return nb.stage(cluster=f"c{int(cluster)}", name=f"second{int(cluster)}")

    return Again() if cut.stages else cut


@step_script()
def jacobian_across_stages(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape, cut.program():
        outputs = tf.reduce_mean(chain(cut, x, w) * y, axis=0)
    return tape.jacobian(outputs, w)


@step_script()
def forward_mode(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """A Jacobian-vector product goes forward with the ops."""
    with tf.autodiff.ForwardAccumulator(primals=x, tangents=y) as forward, cut.program():
        outputs = chain(cut, x, w)
    return outputs, forward.jvp(outputs)


@step_script(4)
def stopped_gradient_across(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """BYOL-like: the target's branch is stopped, at a boundary."""
    with tf.GradientTape() as tape, cut.program():
        with cut.at(0):
            online, target = tf.tanh(x @ w[0]), tf.stop_gradient(tf.tanh(y @ w[0]))
        with cut.at(1):
            online = tf.tanh(online @ w[1])
        with cut.at(2):
            loss = mse(target, online @ w[2])
    gradients = tape.gradient(loss, w)
    descend(w[:3], gradients[:3])
    return loss, gradients


@script()
def reversed_gradient(cut: Cut) -> Loop:
    """Domain adversarial: a custom gradient with the sign turned, between stages."""
    w = weights()

    @tf.custom_gradient
    def turned(v: Any) -> Any:
        return tf.identity(v), lambda d: -0.5 * d

    @train_loop(cut, w)
    def loop(x: Any, y: Any) -> Any:
        with cut.at(0):
            hidden = tf.tanh(x @ w[0])
        with cut.at(1):
            hidden = tf.tanh(turned(hidden) @ w[1])
        with cut.at(2):
            return mse(y, turned(hidden) @ w[2])

    return loop


@step_script()
def recomputed(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    layer = [tf.recompute_grad(lambda v, n=n: tf.tanh(v @ w[n])) for n in range(3)]
    with tf.GradientTape() as tape, cut.program():
        with cut.at(0):
            hidden = layer[0](x)
        with cut.at(1):
            hidden = layer[1](hidden)
        with cut.at(2):
            loss = mse(y, layer[2](hidden))
    gradients = tape.gradient(loss, w)
    descend(w, gradients)
    return loss, gradients


@step_script(grid_only=True)
def seeds_of_gradients(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape, cut.program():
        outputs = chain(cut, x, w)
    gradients = tape.gradient(outputs, w, output_gradients=y)
    descend(w, gradients, 0.01)
    return outputs, gradients


@step_script()
def gradient_in_the_middle(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """The gradient of an activation, for a picture of what matters (Grad-CAM)."""
    with tf.GradientTape() as tape, cut.program():
        with cut.at(0):
            hidden = tf.tanh(x @ w[0])
        tape.watch(hidden)
        with cut.at(1):
            deeper = tf.tanh(hidden @ w[1])
        with cut.at(2):
            loss = tf.reduce_sum((deeper @ w[2]) * y)
    slope = tape.gradient(loss, hidden)
    return slope * hidden, loss
