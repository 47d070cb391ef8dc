"""Gradient tapes have TensorFlow's semantics in a captured step."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.traps.conftest import Cut, build_on_matrices
from whale_nebula.errors import StageFailedError

layers = keras.layers
MICRO = pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 3])


def two_stages(request_gradients: Callable[[Any, Any, Any, list[tf.Variable]], Any]) -> Callable[[Cut], Any]:
    """A step of two stages; `request_gradients(tape, outputs, loss, variables)` gives what it returns."""

    def step(cut: Cut, variables: Any, x: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at("a"):
                hidden = tf.tanh(x @ variables[0])
            with cut.at("b"):
                outputs = hidden @ variables[1]
            loss = tf.reduce_mean(outputs**2)
        return request_gradients(tape, outputs, loss, variables)

    return build_on_matrices(step)


@MICRO
def test_gradient_of_an_input(compare_step: Any, normal: Any, weights: Any, runner: str, micro: int) -> None:
    def step(cut: Cut, variables: Any, x: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            tape.watch(x)
            with cut.at("a"):
                hidden = tf.tanh(x @ variables[0])
            with cut.at("b"):
                loss = tf.reduce_mean((hidden @ variables[1] + x) ** 2)
        return tape.gradient(loss, [x, variables[0]])

    compare_step(build_on_matrices(step), (normal(7, 4),), (normal(7, 4, seed=1),), micro=micro)


@MICRO
@pytest.mark.parametrize("kind", ["none", tf.UnconnectedGradients.ZERO])
def test_unconnected_gradients(compare_step: Any, normal: Any, weights: Any, micro: int, kind: Any) -> None:
    def request_gradients(tape: Any, outputs: Any, loss: Any, variables: list[tf.Variable]) -> Any:
        unused = tf.zeros((3,))
        found = tape.gradient(loss, [variables[0], unused], unconnected_gradients=kind)
        if (found[1] is None) != (kind == "none"):
            raise AssertionError(found)
        return [gradient for gradient in found if gradient is not None]

    compare_step(two_stages(request_gradients), (normal(6, 4),), micro=micro)


@MICRO
def test_ops_outside_the_tape_block_get_no_gradient(compare_step: Any, normal: Any, weights: Any, micro: int) -> None:
    """The regulariser is computed before the tape opens: the loss has it, the gradient has not."""

    def step(cut: Cut, variables: Any, x: Any) -> Any:
        with cut.program():
            with cut.at("a"):
                before = tf.tanh(x @ variables[0])
            with tf.GradientTape() as tape:
                with cut.at("a"):
                    hidden = tf.sin(x @ variables[0]) + before
                with cut.at("b"):
                    outputs = hidden @ variables[1]
                loss = tf.reduce_mean(outputs**2)
        return loss, tape.gradient(loss, variables)

    compare_step(build_on_matrices(step), (normal(6, 4),), micro=micro)


def test_plain_tape_computes_gradients_once(normal: Any, weights: Any) -> None:
    """TensorFlow's own error, in its own words."""
    build = two_stages(lambda tape, outputs, loss, v: [tape.gradient(loss, v[0]) for _ in range(2)])
    with pytest.raises(RuntimeError, match="non-persistent"):
        build(Cut())[0](normal(4, 4))


@MICRO
def test_returned_values_cover_the_whole_batch(
    compare_step: Any, normal: Any, weights: Any, runner: str, micro: int
) -> None:
    """A count, a shape, a sum over the batch and one that is checked: they are those of the whole batch."""

    def request_gradients(tape: Any, outputs: Any, loss: Any, variables: list[tf.Variable]) -> Any:
        checked = tf.debugging.check_numerics(2.0 * tf.reduce_sum(outputs), "no number")
        gradients = tape.gradient(loss, variables)
        mean = tf.sqrt(tf.reduce_mean(outputs**2))
        return tf.shape(outputs)[0], tf.shape(outputs), tf.size(outputs), checked, mean, gradients

    compare_step(two_stages(request_gradients), (normal(7, 4),), micro=micro)


def test_failing_assertion_of_a_loss_restores_variables(normal: Any, weights: Any, runner: str) -> None:
    """The assertion runs before the update, as it does uncut."""
    variables = weights()

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, Cut().program():
            with nb.stage(cluster="a"):
                hidden = x @ variables[0]
            with nb.stage(cluster="b"):
                loss = tf.reduce_sum((hidden @ variables[1]) ** 2)
        tf.debugging.assert_less(2.0 * loss, 0.0)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)
        return loss

    before = [np.array(variable) for variable in variables]
    with pytest.raises(StageFailedError, match="did not hold"):
        step(tf.constant(normal(7, 4)))
    for variable, expected in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, expected)


@MICRO
def test_custom_gradient_with_a_closure(compare_step: Any, normal: Any, weights: Any, runner: str, micro: int) -> None:
    """... over a tensor of the trace and over a variable, in both stages."""

    def build(cut: Cut) -> Any:
        variables = weights()

        @tf.custom_gradient
        def squash(v: Any) -> Any:
            y = tf.tanh(v)
            return y, lambda d: d * (1.0 - y * y) * 1.5

        @tf.custom_gradient
        def multiply_scaled(v: Any) -> Any:
            y = v @ variables[1]

            def backward(d: Any, variables: Any = None) -> Any:
                (kernel,) = variables
                return d @ tf.transpose(kernel), [2.0 * (tf.transpose(v) @ d)]

            return y, backward

        @cut.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                with cut.at("a"):
                    hidden = squash(x @ variables[0])
                with cut.at("b"):
                    loss = tf.reduce_mean(squash(multiply_scaled(hidden)) ** 2)
            return loss, tape.gradient(loss, variables)

        return step, variables

    compare_step(build, (normal(7, 4),), micro=micro)


@MICRO
def test_sparse_gradients_stay_indexed_slices(compare_step: Any, normal: Any, micro: int) -> None:
    """The user's code gets IndexedSlices, and may return them; a variable tied over stages is dense."""

    def build(cut: Cut) -> Any:
        table, tied, kernel = (tf.Variable(normal(5, 4, seed=n)) for n in (1, 2, 3))

        @cut.function
        def step(ids: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                with cut.at("a"):
                    hidden = tf.gather(table, ids) + tf.gather(tied, ids)
                with cut.at("b"):
                    loss = tf.reduce_mean((hidden @ tf.transpose(tied) @ kernel) ** 2)
            sparse, dense = tape.gradient(loss, [table, tied])
            if not isinstance(sparse, tf.IndexedSlices) or isinstance(dense, tf.IndexedSlices):
                raise AssertionError((sparse, dense))
            return sparse.values, sparse.indices, dense

        return step, [table, tied]

    compare_step(build, (np.array([0, 3, 3, 1, 4, 0]),), micro=micro)


def build_with_dropout(cut: Cut, rate: float = 0.5, recompute: bool = False) -> keras.Model:
    inputs = keras.Input((4,))
    with cut.program():
        with cut.at("a"):
            hidden = layers.Dropout(rate, seed=7)(layers.Dense(8, activation="tanh")(inputs))
        with cut.at("b"):
            outputs = layers.Dense(3)(layers.Dropout(rate, seed=8)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.grid), True])
def test_dropout_with_one_micro_batch_is_bit_identical(
    compare_fit: Any, normal: Any, runner: str, recompute: bool
) -> None:
    """Seeds are variables, and end where they end uncut."""
    compare_fit(build_with_dropout, normal(16, 4), normal(16, 3, seed=1), exact=True, recompute=recompute)


@MICRO
def test_dropout_seeds_advance_once_per_micro_batch(compare_fit: Any, normal: Any, runner: str, micro: int) -> None:
    """The mask's shape comes from a layer's output; that layer's update must still run once a step."""
    found = compare_fit(
        lambda cut: build_with_dropout(cut, rate=1e-7), normal(18, 4), normal(18, 3, seed=1), micro=micro, batch_size=9
    )
    seeds = [v for v in found.variables if "seed" in v.path]
    assert seeds
    assert {int(v.numpy()[-1]) for v in seeds} == {4 * micro}


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.grid), True])
def test_dropout_with_micro_batches_is_reproducible(normal: Any, runner: str, recompute: bool) -> None:
    found = []
    for schedule in ("gpipe", "eager-1f1b"):
        keras.utils.set_random_seed(3)
        model = build_with_dropout(Cut(True, 3, {"recompute": recompute, "schedule": schedule}))
        model.fit(normal(12, 4), normal(12, 3, seed=1), batch_size=6, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_recompute_with_dropout_draws_the_same_mask(normal: Any) -> None:
    """The saved state of the seed is read, not the advanced one: gradients are those without recompute."""
    found = []
    for recompute in (False, True):
        keras.utils.set_random_seed(3)
        model = build_with_dropout(Cut(True, 2, {"recompute": recompute}))
        model.fit(normal(12, 4), normal(12, 3, seed=1), batch_size=6, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def build_normalised(cut: Cut) -> keras.Model:
    inputs = keras.Input((4,))
    with cut.program():
        with cut.at("a"):
            hidden = layers.BatchNormalization(name="norm")(layers.Dense(8)(inputs))
        with cut.at("b"):
            outputs = layers.Dense(3)(tf.keras.layers.Activation("tanh")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.grid
def test_batch_normalisation_with_one_micro_batch(compare_fit: Any, normal: Any, runner: str) -> None:
    compare_fit(build_normalised, normal(16, 4), normal(16, 3, seed=1))


@MICRO
@pytest.mark.parametrize("fold", [pytest.param("mean", marks=pytest.mark.grid), "sum", "weighted", "two"])
def test_loss_is_weighted_by_its_fold(compare_step: Any, normal: Any, weights: Any, micro: int, fold: str) -> None:
    losses = {
        "mean": lambda rows, w: tf.reduce_mean(rows),
        "sum": lambda rows, w: tf.reduce_sum(rows),
        "weighted": lambda rows, w: tf.reduce_sum(rows * w) / tf.reduce_sum(w),
        "two": lambda rows, w: tf.reduce_mean(rows) + 0.1 * tf.reduce_sum(rows * w) / (tf.reduce_sum(w) + 1.0),
    }

    def step(cut: Cut, variables: Any, x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at("a"):
                hidden = tf.tanh(x @ variables[0])
            with cut.at("b"):
                rows = tf.reduce_sum((hidden @ variables[1]) ** 2, axis=1)
            loss = losses[fold](rows, w)
        return loss, tape.gradient(loss, variables)

    compare_step(build_on_matrices(step), (normal(7, 4), np.array([1, 5, 2, 0.5, 7, 1, 3], "float32")), micro=micro)
