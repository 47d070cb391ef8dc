"""Gradients that are modified before they are applied, and gradients that are accumulated over several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    descend,
    differentiate,
    mse,
    rows,
    script,
    step_script,
    train_loop,
    weights,
)

Edit = Callable[[list[Any], list[Any]], list[Any]]


def edited(cut: Cut, edit: Edit) -> Loop:
    """A loop whose gradients pass through `edit(gradients, variables)`."""

    def update(gradients: Any, w: Any) -> Any:
        changed = edit(gradients, w)
        descend(w, changed)
        return changed

    w = weights()
    return train_loop(cut, w, update=update)(lambda x, y: mse(y, chain(cut, x, w)))


@step_script()
def scaled(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    loss, gradients = differentiate(cut, w, x, y)
    gradients = [0.5 * g / (1.0 + loss) for g in gradients]
    descend(w, gradients)
    return loss, gradients


@script()
def clipped_by_global_norm(cut: Cut) -> Loop:
    return edited(cut, lambda gradients, w: tf.clip_by_global_norm(gradients, 0.1)[0])


@script(grid_only=True)
def decayed_by_hand(cut: Cut) -> Loop:
    return edited(cut, lambda gradients, w: [g + 0.1 * v for g, v in zip(gradients, w, strict=True)])


@script()
def noisy(cut: Cut) -> Loop:
    """The same noise each time: it is drawn from a seed that counts steps."""
    count = tf.Variable(0, dtype=tf.int32)

    def edit(gradients: list[Any], w: list[Any]) -> list[Any]:
        count.assign_add(1)
        return [g + 0.1 * tf.random.stateless_normal(g.shape, [n, count]) for n, g in enumerate(gradients)]

    return edited(cut, edit)


@step_script(state=lambda: [tf.Variable([1.0, 2.0])])
def none_becomes_zero(cut: Cut, w: Any, x: Any, y: Any, unused: Any) -> Any:
    with tf.GradientTape() as tape, cut.program():
        loss = mse(y, chain(cut, x, w))
    variables = [*w, unused]
    found = tape.gradient(loss, variables)
    gradients = [tf.zeros_like(v) if g is None else g for g, v in zip(found, variables, strict=True)]
    descend(variables, gradients)
    return loss, gradients


@script()
def skipped_if_not_finite(cut: Cut) -> Loop:
    """A cond around the update; the second batch makes a number that is none."""
    w, skipped = weights(), tf.Variable(0)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        loss, gradients = differentiate(cut, w, x, y)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

        def apply() -> Any:
            descend(w, gradients)
            return tf.constant(True)

        def skip() -> Any:
            skipped.assign_add(1)
            return tf.constant(False)

        return loss, tf.cond(finite, apply, skip)

    batches = rows(4)
    batches[1][1][0, 0] = float("inf")
    return Loop(step, [*w, skipped], batches)


@step_script()
def projected_conflict(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """PCGrad: two tasks, and where their gradients disagree, one is projected onto the other."""
    with tf.GradientTape(persistent=True) as tape, cut.program():
        outputs = chain(cut, x, w)
        one, other = mse(y, outputs), tf.reduce_mean(tf.abs(outputs + y))
    a, b = tape.gradient(one, w), tape.gradient(other, w)
    dots = tf.add_n([tf.reduce_sum(p * q) for p, q in zip(a, b, strict=True)])
    size = tf.add_n([tf.reduce_sum(q * q) for q in b])
    along = tf.minimum(dots / size, 0.0)
    descend(w, [p - along * q + q for p, q in zip(a, b, strict=True)])
    return one, other, dots


@step_script()
def sharpness_aware(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """SAM: climb, ask again, come back, descend. Three phases."""
    with cut.program():
        with tf.GradientTape() as tape:
            loss = mse(y, chain(cut, x, w))
        first = tape.gradient(loss, w)
        norm = tf.linalg.global_norm(first)
        climbs = [0.05 * g / (norm + 1e-8) for g in first]
        for v, climb in zip(w, climbs, strict=True):
            v.assign_add(climb)
        with tf.GradientTape() as tape:
            above = mse(y, chain(cut, x, w))
        second = tape.gradient(above, w)
    for v, climb in zip(w, climbs, strict=True):
        v.assign_sub(climb)
    descend(w, second)
    return loss, above


# ---------------------------------------------------------------------- accumulation by hand
@script()
def accumulated_under_cond(cut: Cut) -> Loop:
    w = weights()
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in w]
    count = tf.Variable(0, dtype=tf.int64)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        loss, gradients = differentiate(cut, w, x, y)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        count.assign_add(1)

        def apply() -> Any:
            descend(w, [total / 2.0 for total in sums])
            for total in sums:
                total.assign(tf.zeros_like(total))
            return tf.constant(1)

        return loss, tf.cond(tf.equal(count % 2, 0), apply, lambda: tf.constant(0))

    return Loop(step, [*w, *sums, count], rows(4))


@script()
def accumulated_by_python(cut: Cut) -> Loop:
    """A Python flag, which retraces: two programs over the same variables."""
    w = weights()
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in w]

    @cut.function
    def step(x: Any, y: Any, apply: bool) -> Any:
        loss, gradients = differentiate(cut, w, x, y)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        if apply:
            descend(w, [total / 2.0 for total in sums])
            for total in sums:
                total.assign(tf.zeros_like(total))
        return loss

    return Loop(step, [*w, *sums], [(*batch, n % 2 == 1) for n, batch in enumerate(rows(4))])


@script(micro=(1,))
def gradient_in_a_cond(cut: Cut) -> Loop:
    """The tape is asked inside a branch."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any, train: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x, w))
        gradients = tf.cond(train, lambda: tape.gradient(loss, w), lambda: [tf.zeros_like(v) for v in w])
        descend(w, gradients)
        return loss, gradients

    return Loop(step, w, [(*batch, tf.constant(n != 1)) for n, batch in enumerate(rows())])


@step_script(state=lambda: [tf.Variable(0)])
def update_in_a_branch(cut: Cut, w: Any, x: Any, y: Any, count: Any) -> Any:
    """All of the update under AutoGraph's `if`."""
    loss, gradients = differentiate(cut, w, x, y)
    if loss > 1.0:
        for v, g in zip(w, gradients):  # noqa: B905 - AutoGraph converts it as it is
            v.assign_sub(0.1 * g)
    else:
        count.assign_add(1)
    return loss
