"""Seventeen pitfalls of TensorFlow and Keras that a prototype met, each tested through the public API.

Traps 2, 3, 6, 7, 9 and 10 are scripts of the parity harness, which `make test` always runs: `TRAPS` in
tests/parity/test_cases.py. Trap 1, weight decay and `iterations` that run once a step, is in `zoo functional` there.
"""

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.traps.conftest import Cut
from whale_nebula.capture.step import signature
from whale_nebula.errors import (
    BatchAxisError,
    BoundaryInBodyError,
    NebulaError,
    StageOrderError,
    UnsupportedError,
)
from whale_nebula.runtime.keras import make_keras_step

layers = keras.layers


def dense_model(cut: Any, optimizer: Any, loss: str = "mse", **compile_options: Any) -> keras.Model:
    inputs = keras.Input((4,))
    with cut.program():
        with cut.at("a"):
            hidden = layers.Dense(6, activation="tanh")(inputs)
        with cut.at("b"):
            outputs = layers.Dense(3)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss, **compile_options)
    return model


# 4: metrics fed with scalars count once a step, not once a micro-batch.


class DoubledMean(keras.metrics.Mean):
    """A metric that overrides update_state."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        super().update_state(2.0 * values, sample_weight=sample_weight)


class ModelWithMetrics(keras.Model):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut, self.first, self.second = cut, layers.Dense(5, activation="tanh"), layers.Dense(3)
        self.plain, self.own = keras.metrics.Mean(name="plain"), DoubledMean(name="own")

    def call(self, x: Any) -> Any:
        with self.cut.program():
            with self.cut.at("a"):
                hidden = self.first(x)
            with self.cut.at("b"):
                return self.second(hidden)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.plain.update_state(loss)
        self.own.update_state(loss)
        return {"plain": self.plain.result(), "own": self.own.result()}


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 3])
def test_trap_04_metrics_of_scalars_count_once(compare_fit: Any, normal: Any, runner: str, micro: int) -> None:
    def build(cut: Cut) -> Any:
        model = ModelWithMetrics(cut)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    model = compare_fit(build, normal(16, 4), normal(16, 3, seed=1), micro=micro)
    assert float(model.plain.count.numpy()) == 2.0


# 5: Keras's loss tracker asks for the rows of x: the last stage must not be fed x for that.


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_trap_05_last_stage_does_not_receive_x(normal: Any, micro: int) -> None:
    model = dense_model(Cut(True, micro), "sgd")
    step, arguments, unpack = make_keras_step(model, "train", (tf.constant(normal(8, 4)), tf.constant(normal(8, 3))))
    cut = step.plan(arguments, unpack).cut
    x = next(leaf.op for leaf in cut.program.leaves if leaf.name == "x")
    first, last = cut.phases[0].stages
    assert x in {value.op for value in first.forward.feeds}
    for fragment in (last.forward, last.backward):
        assert fragment is None or x not in {value.op for value in fragment.feeds}


# 8: `Sequential.add` rebuilds every node, or makes none.


@pytest.mark.parametrize("with_input", [pytest.param(True, marks=pytest.mark.grid), False])
def test_trap_08_sequential_add_layer_by_layer(compare_fit: Any, normal: Any, with_input: bool) -> None:
    def build(cut: Cut) -> Any:
        model = keras.Sequential([keras.Input((4,))] if with_input else [])
        with cut.program():
            with cut.at("a"):
                model.add(layers.Dense(5, activation="tanh"))
            with cut.at("b"):
                model.add(layers.Dense(4, activation="tanh"))
            with cut.at("c"):
                model.add(layers.Dense(3))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    compare_fit(build, normal(16, 4), normal(16, 3, seed=1), stages=3, micro=2)


# 11: gradients of embeddings are colocated with ops that the fragment does not have.


@pytest.mark.grid
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_trap_11_sparse_embedding_under_global_clipnorm(compare_fit: Any, normal: Any, runner: str, micro: int) -> None:
    """... under global_clipnorm, which squares the un-added rows: a dense gradient gives another norm."""

    def build(cut: Cut) -> Any:
        inputs = keras.Input((3,), dtype="int32")
        with cut.program():
            with cut.at("a"):
                hidden = layers.Embedding(5, 4)(inputs)
            with cut.at("b"):
                outputs = layers.Dense(3)(layers.Flatten()(hidden))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5, global_clipnorm=0.05), "mse")
        return model

    ids = np.random.default_rng(4).integers(0, 5, (16, 3))
    compare_fit(build, ids, normal(16, 3, seed=1), micro=micro)


# 12: twin variables are told apart, and our many functions do not look like retracing.


def test_trap_12_variables_of_equal_name_are_distinct(
    compare_step: Any, normal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def build(cut: Cut) -> Any:
        twins = [tf.Variable(normal(4, 4, seed=s), name="twin") for s in (1, 2, 3)]

        @cut.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                with cut.at("a"):
                    hidden = tf.tanh(x @ twins[0]) @ twins[1]
                with cut.at("b"):
                    loss = tf.reduce_mean(hidden @ twins[2])
            for variable, gradient in zip(twins, tape.gradient(loss, twins), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        return step, twins

    compare_step(build, *[(normal(6, 4, seed=n),) for n in range(3)], micro=2)
    step, _ = build(Cut(micro=2))
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        for rows in range(2, 10):
            step(normal(rows, 4))
    assert "retracing" not in caplog.text


# 13: a scope in a body would stamp nothing; stages that go back would see no gradient.


def test_trap_13_scope_in_a_compiled_function_is_refused(normal: Any) -> None:
    @tf.function(jit_compile=True)
    def inner(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return tf.tanh(x)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            return inner(x)

    with pytest.raises(BoundaryInBodyError, match="jit_compile=True") as caught:
        step(normal(4, 4))
    assert "test_traps.py" in str(caught.value)
    assert "remove jit_compile=True" in caught.value.mend


def test_trap_13_cyclic_stages_are_refused(normal: Any, weights: Any) -> None:
    first, second = weights()

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = tf.tanh(x @ first)
            with nb.stage(cluster="b"):
                hidden = tf.sin(hidden @ second)
            with nb.stage(cluster="a"):
                loss = tf.reduce_mean(hidden @ first)
        return tape.gradient(loss, first)

    with pytest.raises(StageOrderError, match=r"nb\.stage\(cluster='a', name='a_2'\)") as caught:
        step(normal(4, 4))
    assert "test_traps.py" in str(caught.value)


# 14: an argument whose first axis is not the batch; a batch size that is baked in; too few rows.


def table_step(decorate: Any, micro: int) -> Any:
    @decorate
    def look_up(ids: Any, table: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro):
            with nb.stage(cluster="a"):
                rows = tf.gather(table, ids)
            with nb.stage(cluster="b"):
                return tf.reduce_sum(rows**2, axis=1)

    return look_up


def test_trap_14_argument_without_batch_axis_is_reported(normal: Any) -> None:
    with pytest.raises(BatchAxisError, match=r"whole=\('table',\)") as caught:
        table_step(nb.function, 2)(tf.constant([1, 0, 2, 2]), normal(3, 5))
    assert "'table' has 3 rows" in str(caught.value)


def test_trap_14_whole_argument_is_not_divided(normal: Any) -> None:
    table = normal(3, 5)
    found = table_step(nb.function(whole=("table",)), 2)(tf.constant([1, 0, 2, 2]), table)
    np.testing.assert_allclose(found, (table**2).sum(1)[[1, 0, 2, 2]], rtol=1e-6)


def test_trap_14_row_counts_may_differ_with_one_micro_batch(normal: Any) -> None:
    table = normal(3, 5)
    found = table_step(nb.function, 1)(tf.constant([1, 0, 2, 2]), table)
    np.testing.assert_allclose(found, (table**2).sum(1)[[1, 0, 2, 2]], rtol=1e-6)


def test_trap_14_static_batch_size_is_refused(normal: Any) -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
            return tf.reshape(x, (x.shape[0] // 2, -1))

    with pytest.raises(NebulaError, match=r"tf\.shape"):
        step(normal(4, 4))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_trap_14_fewer_rows_than_micro_batches(
    compare_step: Any, normal: Any, weights: Any, runner: str, rows: int, recwarn: Any
) -> None:
    def build(cut: Cut) -> Any:
        first, second = weights()

        @cut.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                with cut.at("a"):
                    hidden = tf.tanh(x @ first)
                with cut.at("b"):
                    loss = tf.reduce_mean((hidden @ second) ** 2)
            first.assign_sub(tape.gradient(loss, first))
            return loss

        return step, [first, second]

    compare_step(build, (normal(rows, 4),), micro=4)
    assert nb.last_report().micro_batches == rows


# 15: what is never traced is refused. Other options of `compile` are in tests/scripts/refusals/test_settings.py.


def test_trap_15_run_eagerly_is_refused(normal: Any) -> None:
    model = dense_model(Cut(), "sgd", run_eagerly=True)
    with pytest.raises(UnsupportedError, match="run_eagerly"):
        model.fit(normal(8, 4), normal(8, 3), verbose=0)


# 16: token weights that are large in number, times a loss scale, must not overflow half precision.


def test_trap_16_large_denominators_do_not_overflow_fp16(normal: Any) -> None:
    def build(cut: Cut) -> Any:
        inputs = keras.Input((64,))
        with cut.program():
            with cut.at("a"):
                hidden = layers.Dense(8, activation="tanh", dtype="mixed_float16")(inputs)
            with cut.at("b"):
                outputs = layers.Dense(2, dtype="mixed_float16")(hidden)
        model = keras.Model(inputs, layers.Activation("linear", dtype="float32")(outputs))
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**15)
        model.compile(scaled, keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
        return model

    found = []
    for cut in (Cut(on=False), Cut(True, 3)):
        keras.utils.set_random_seed(3)
        model = build(cut)
        weights = np.full(48, 5000.0, "float32")
        model.fit(normal(48, 64), normal(48, 2, seed=1), sample_weight=weights, batch_size=24, shuffle=False, verbose=0)
        found.append([np.array(v) for v in model.trainable_variables])
        assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**15, "a gradient overflowed"
    for a, b in zip(*found, strict=True):
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(a) + 1e-4


# 17: a kept read of a variable keeps its buffer: the backward reads variables anew.


def test_trap_17_variable_reads_are_not_residuals(normal: Any, weights: Any) -> None:
    first, second = weights()

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = tf.tanh(tf.tanh(x @ first) @ first)
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean((hidden @ second) ** 2)
        for variable, gradient in zip((first, second), tape.gradient(loss, [first, second]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    arguments, unpack = step.arguments(tf.constant(normal(4, 4)))
    cut = step.step.plan(arguments, unpack).cut
    graph = cut.program.graph
    stage = cut.phases[0].stages[0]
    assert stage.backward is not None
    kept = set(stage.forward.fetches) & set(stage.backward.feeds)
    assert kept
    assert "ReadVariableOp" not in {graph.ops[value.op].type for value in kept}
    assert signature(arguments)[0].names == ("x",)
