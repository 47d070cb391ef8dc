"""Errors name the user's line and the Keras layer, also for a model that was built elsewhere."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data
from whale_nebula.capture.layer_placement import list_layer_paths
from whale_nebula.errors import BatchCoupledError, NebulaWarning, StageOrderError

layers = keras.layers
X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def find_line(function: Callable[..., Any], text: str) -> str:
    """'file:line' of the line in a function that ends with this."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [number for number, line in enumerate(lines) if line.rstrip().endswith(text)]
    return f"{__file__}:{first + found}"


def train(model: Any) -> None:
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


def functional() -> Any:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = layers.Dense(8)(inputs)
            hidden = layers.BatchNormalization(name="norm_1")(hidden)  # here
        with nb.stage(cluster="npu"):
            outputs = layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


def nested() -> Any:
    encoder = keras.Sequential([layers.Dense(8), layers.BatchNormalization(name="norm_1")], name="encoder")
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = encoder(inputs)  # here
        with nb.stage(cluster="npu"):
            outputs = layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


def sequential() -> Any:
    model = keras.Sequential([keras.Input((4,))])
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            model.add(layers.Dense(8))
            model.add(layers.BatchNormalization(name="norm_1"))  # here
        with nb.stage(cluster="npu"):
            model.add(layers.Dense(1))
    return model


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__(name="block")
        self.norm = layers.BatchNormalization(name="norm_1")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.norm(x, training=training)  # here


def with_a_block() -> Any:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = Block()(layers.Dense(8)(inputs))
        with nb.stage(cluster="npu"):
            outputs = layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize(
    ("build", "source", "path"),
    [
        pytest.param(functional, functional, "norm_1", marks=pytest.mark.grid),
        (nested, nested, "encoder/norm_1"),
        pytest.param(sequential, sequential, "norm_1", marks=pytest.mark.grid),
        (with_a_block, Block.call, "block/norm_1"),
    ],
)
def test_coupling_layer_is_reported_with_its_calling_line(
    build: Callable[[], Any], source: Callable[..., Any], path: str
) -> None:
    with pytest.raises(BatchCoupledError) as caught:
        train(build())
    assert f"BatchNormalization {path!r} makes its rows depend on each other" in caught.value.what
    assert caught.value.line == find_line(source, "# here")
    assert not any("loss_weight" in mend for mend in caught.value.mends)
    assert any("LayerNormalization" in mend for mend in caught.value.mends)


def model_with_stages_in_a_cycle() -> Any:
    inputs = keras.Input((4,))
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = layers.Dense(8)(inputs)
        with nb.stage(cluster="npu"):
            hidden = layers.Dense(8, name="middle")(hidden)  # made
        with nb.stage(cluster="gpu"):
            outputs = layers.Dense(1, name="last")(hidden)  # read
    return keras.Model(inputs, outputs)


def test_cyclic_stages_are_reported_with_lines() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StageOrderError) as caught:
            train(model_with_stages_in_a_cycle())
    assert caught.value.where == find_line(model_with_stages_in_a_cycle, "# read")
    made = find_line(model_with_stages_in_a_cycle, "# made")
    assert f"Dense 'last' of 'gpu' reads Dense 'middle' of 'npu' ({made})" in caught.value.why


def test_gradient_flowing_into_a_later_stage_is_refused() -> None:
    """The stage that made it is done when its gradient comes: it would be lost."""
    first, second = (tf.Variable(tf.eye(4)) for _ in range(2))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            with nb.stage(cluster="gpu"):
                hidden = x @ first
            with nb.stage(cluster="npu"):
                made = tf.tanh(hidden @ second)
                loss = tf.reduce_mean(made)
        first.assign_sub(tape.gradient(loss, first))
        with tf.GradientTape() as again:
            again.watch(made)
            with nb.stage(cluster="gpu"):
                loss = tf.reduce_mean(made @ first)
        return again.gradient(loss, made)

    with pytest.raises(StageOrderError, match="flows from stage 'gpu' back into 'npu'"):
        step(tf.constant(X))


def test_too_few_rows_warn_at_the_users_line() -> None:
    def fit() -> None:
        model.fit(X[:1], Y[:1], verbose=0)  # here

    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(4):
        with nb.stage(cluster="gpu"):
            hidden = layers.Dense(8)(inputs)
        with nb.stage(cluster="npu"):
            outputs = layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with pytest.warns(NebulaWarning, match="the first batch has 1 row") as caught:
        fit()
    (found,) = [each for each in caught if each.category is NebulaWarning]
    assert f"{found.filename}:{found.lineno}" == find_line(fit, "# here")


# -------------------- `nb.place` with `nb.split` for layers whose code is not the user's: the same plan as with
def model() -> keras.Model:
    inner = keras.Sequential([layers.Dense(12, name="wide"), layers.Dense(6, name="narrow")], name="body")
    inputs = keras.Input((4,))
    found = keras.Model(inputs, layers.Dense(8, name="head")(inner(inputs)))
    found.compile("sgd", "mse")
    return found


def test_placed_split_divides_variables_of_matching_layers() -> None:
    placed = model()
    with nb.cluster():
        nb.place(placed, {"body": "gpu", "head": "npu", "body/wide": nb.split(2), "he.+": nb.split(2, axis=0)})
    plan = nb.plan(placed, data(6, 4), data(6, 8))
    kernels = {path: layout for path, layout in plan.layouts.items() if path.endswith("kernel")}
    assert kernels == {"body/wide/kernel": "split(1)", "head/kernel": "split(0)", "body/narrow/kernel": "split(0)"}


def test_placed_split_trains_as_the_uncut_model() -> None:
    keras.utils.set_random_seed(1)
    placed = model()
    before = placed.get_weights()
    expected = placed.fit(data(12, 4), data(12, 8), batch_size=6, shuffle=False, verbose=0).history["loss"]
    placed.set_weights(before)
    with nb.cluster():
        nb.place(placed, {"body": "gpu", "body/wide": nb.split(2)})
    found = placed.fit(data(12, 4), data(12, 8), batch_size=6, shuffle=False, verbose=0).history["loss"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert nb.last_report().stages.keys() == {"gpu"}


def test_split_pattern_without_layers_is_refused() -> None:
    with nb.cluster(), pytest.raises(nb.errors.PlacementError, match="matches 'heat'"):
        nb.place(model(), {"body": "gpu", "heat": nb.split(2)})


# -------------------- Paths are names from the model to the layer, however the model was built
class Cell(layers.Layer):
    def __init__(self, *inside: Any, **options: Any) -> None:
        super().__init__(**options)
        self.inside = list(inside)


def paths(model: Any) -> list[str]:
    return [spot.path for spot in list_layer_paths(model)]


def test_layer_paths_omit_inputs_and_list_parents_first() -> None:
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a")], name="inner")
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1, name="b")(inner(inputs)))
    assert paths(model) == ["inner", "inner/a", "b"]


def test_layer_paths_are_equal_before_and_after_build() -> None:
    model = keras.Sequential([layers.Dense(2, name="a"), layers.Dropout(0.1, name="drop")], name="model")
    before = paths(model)
    model.build((None, 2))
    assert paths(model) == before == ["a", "drop"]
    assert [layer.path for layer in model.layers] != before


def test_layer_paths_number_siblings_of_one_name() -> None:
    assert paths(Cell(*(layers.Dense(2, name="dense") for _ in range(3)))) == ["dense", "dense#2", "dense#3"]


def test_layer_paths_repeat_shared_layers_and_end_at_cycles() -> None:
    shared = layers.Dense(2, name="shared")
    first, second = Cell(shared, name="first"), Cell(shared, name="second")
    model = Cell(first, second, name="model")
    first.around = model
    found = list(list_layer_paths(model))
    assert [spot.path for spot in found] == ["first", "first/shared", "second", "second/shared"]
    assert [spot.around for spot in found] == ["", "first", "", "second"]
    assert found[1].layer is found[3].layer
    assert found[3].parent is second
