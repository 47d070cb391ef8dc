"""The pieces of a step that XLA compiles, by their functions' attributes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.step import capture, signature
from whale_nebula.runtime.step.engine import Engine, engine


def ran(middle: Any, jit: bool = True, links: str | None = None) -> Engine:
    """A training step of two stages with `middle` in the second, run once."""
    if links is not None:
        nb.init(links=links)
    weight = tf.Variable(tf.ones([4, 4]) * 0.1)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = tf.tanh(x @ weight)
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(middle(hidden))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    layout, tensors = signature([("x", tf.ones([8, 4]))])

    def call(given: Any) -> Any:
        return step(*given)

    made = engine(capture(call, layout), call, layout, "step", jit=jit)
    made.run(tensors)
    return made


def compiled(made: Engine) -> set[str]:
    """The kinds of fragments that XLA compiles, with their stages."""
    pieces = made.runner.compiled._pieces.items()
    return {
        f"{fragment.kind} {fragment.stage}"
        for fragment, piece in pieces
        if "_XlaMustCompile" in piece.function.concrete.function_def.attr
    }


@pytest.mark.parametrize("links", [None, "1gbit,0ms"])
def test_forward_and_backward_are_compiled_and_the_update_is_not(links: str | None) -> None:
    made = ran(tf.square, links=links)
    assert compiled(made) == {"forward 0", "backward 0", "fused 1"}
    assert made.xla is not None
    assert made.xla.notes == []


def test_nothing_is_compiled_unasked() -> None:
    assert compiled(ran(tf.square, jit=False)) == set()


@pytest.mark.parametrize(
    ("middle", "held"),
    [
        (lambda h: tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.sin(h)), [0, h])[1], "While"),
        (lambda h: tf.cond(tf.reduce_sum(h) > 0, lambda: h, lambda: -h), "If"),
        (lambda h: tf.ensure_shape(tf.py_function(tf.identity, [h], tf.float32), h.shape), "EagerPyFunc"),
        (lambda h: h + 0.0 * tf.cast(tf.strings.length(tf.strings.as_string(h)), tf.float32), "AsString"),
        (lambda h: tf.function(lambda t: tf.py_function(tf.identity, [t], tf.float32))(h), "EagerPyFunc"),
    ],
)
def test_a_stage_that_it_cannot_take_is_left_out_and_named(middle: Any, held: str) -> None:
    made = ran(middle)
    assert compiled(made) == {"forward 0", "backward 0"}
    assert made.xla is not None
    (note,) = made.xla.notes
    assert note.startswith("stage 'b' is not compiled by XLA: it holds ")
    assert held in note


def test_checks_are_not_given_up() -> None:
    def checked(h: Any) -> Any:
        tf.debugging.assert_less(h, 100.0)
        return h

    assert compiled(ran(checked)) == {"forward 0", "backward 0"}
