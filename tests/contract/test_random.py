"""TensorFlow's own random ops: a variable can supply the numbers of their kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.tf import patch as tf_patch
from whale_nebula.tf.patch import apply_patches

SHAPES = [(), (3,), (8, 64)]
DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda shape: tf.random.uniform(shape, 1.0, 3.0, seed=7),
    "normal": lambda shape: tf.random.normal(shape, seed=7, dtype=tf.float64),
    "truncated": lambda shape: tf.random.truncated_normal(shape, seed=7),
    "integers": lambda shape: tf.random.uniform(shape, 3, 99, tf.int64, seed=7),
    "dropout": lambda shape: tf.nn.dropout(tf.ones(shape), 0.5, seed=7),
}


def draw_three_times(draw: Callable[[Any], Any]) -> list[Any]:
    """What three calls of one function draw, of all shapes."""
    function = tf.function(lambda: [draw(tf.constant(shape, tf.int32)) for shape in SHAPES])
    return [each.numpy() for _ in range(3) for each in function()]


@pytest.mark.parametrize("name", DRAWS)
def test_patch_draws_draws_the_numbers_of_the_kernel(name: str) -> None:
    plain, states = draw_three_times(DRAWS[name]), []

    def asked(seed: int, seed2: int) -> Any:
        states.append(tf_patch.make_generator_state(seed, seed2, "draws"))
        return states[-1]

    with apply_patches(tf_patch.patch_draws(asked)):
        counted = draw_three_times(DRAWS[name])
    assert len(states) == len(SHAPES)
    for one, other in zip(plain, counted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_patch_draws_without_a_state_uses_the_kernel() -> None:
    asked: list[tuple[int, int]] = []
    with apply_patches(tf_patch.patch_draws(lambda seed, seed2: asked.append((seed, seed2)))):
        graph = tf.function(lambda: tf.random.normal([3], seed=7)).get_concrete_function().graph
    assert [op.type for op in graph.get_operations() if op.op_def.is_stateful] == ["RandomStandardNormal"]
    assert len(asked) == 1 and any(asked[0])


def test_make_generator_state_outside_the_traced_function() -> None:
    states = []

    def body() -> None:
        states.append(tf_patch.make_generator_state(1, 2, "draws"))

    function = tf.function(body)
    function.get_concrete_function()
    assert [state.numpy().tolist() for state in states] == [[0, 2, 1]] * len(states)


def test_apply_patches_is_temporary() -> None:
    plain = tf.random.normal
    with apply_patches([tf_patch.Patch(tf.random, "normal", None)] * 2):
        assert tf.random.normal is None
    assert tf.random.normal is plain
