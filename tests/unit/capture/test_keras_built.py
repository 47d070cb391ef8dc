"""A model whose first use is a step under scopes or `nb.place` is built as Keras builds it, so its files load."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.runtime.keras_hook import _make_keras_tensors
from whale_nebula.tf.keras_import import unwrap_keras, wrap_keras

ROWS, WIDTH = 8, 3
X = np.random.default_rng(1).random((ROWS, WIDTH), np.float32)
Y = np.random.default_rng(2).random((ROWS, 1), np.float32)
_with_scopes = False


def stage(cluster: str) -> contextlib.AbstractContextManager[Any]:
    """A scope where the test asks for scopes in `call`."""
    return nb.stage(cluster=cluster) if _with_scopes else contextlib.nullcontext()


class TwoStages(keras.Model):
    def call(self, x: Any) -> Any:
        with stage("gpu"):
            hidden = self.first(x)
        with stage("npu"):
            return self.second(hidden)


@keras.saving.register_keras_serializable("built")
class Flat(TwoStages):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)


@keras.saving.register_keras_serializable("built")
class Block(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.inner(x)


@keras.saving.register_keras_serializable("built")
class Nested(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = Block(), keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        with stage("gpu"):
            hidden = self.first(x)
        with stage("npu"):
            return self.second(hidden)


@keras.saving.register_keras_serializable("built")
class BuildingModel(TwoStages):
    def build(self, input_shape: Any) -> None:
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], 4))


@keras.saving.register_keras_serializable("built")
class TwoInputs(Flat):
    def call(self, inputs: Any) -> Any:
        parts = inputs.values() if isinstance(inputs, dict) else inputs
        return super().call(keras.ops.concatenate(list(parts), -1))


MODELS: dict[str, tuple[type[keras.Model], Any]] = {
    "flat": (Flat, X),
    "nested": (Nested, X),
    "builds itself": (BuildingModel, X),
    "two inputs": (TwoInputs, [X, X]),
    "inputs by name": (TwoInputs, {"a": X, "b": X}),
}
FIRST_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda model, x: model.fit(x, Y, verbose=0),
    "evaluate": lambda model, x: model.evaluate(x, Y, verbose=0),
    "predict": lambda model, x: model.predict(x, verbose=0),
    "train_on_batch": lambda model, x: model.train_on_batch(x, Y),
}
SAMPLE = {
    ("nested", "place", "fit"),
    ("builds itself", "scopes", "fit"),
}
GRID = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.grid)
    for case in itertools.product(MODELS, ["place", "scopes"], FIRST_CALLS)
    if case[:2] != ("builds itself", "place")  # it has no layers to place yet
]


def place(model: keras.Model) -> None:
    first, second = model.layers
    nb.place(model, {f"{first.name}(/.*)?": "gpu", f"{second.name}(/.*)?": "npu"})


class RandomModel(TwoStages):
    """Its initial values are drawn, and computed, in several ways."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first = keras.layers.Dense(4, kernel_initializer="orthogonal", bias_initializer="random_normal")
        self.second = keras.layers.Dense(1, kernel_initializer="truncated_normal")


def train_model(kind: str, way: str, first: str, rate: float = 0.1) -> keras.Model:
    global _with_scopes
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    made, x = MODELS.get(kind, (RandomModel, X))
    model = made(name="net")
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    _with_scopes = way == "scopes"
    try:
        if way == "place":
            place(model)
        FIRST_CALLS[first](model, x)
    finally:
        _with_scopes = False
    return model


def describe_state(model: keras.Model) -> dict[str, Any]:
    """What Keras keeps of having been built, of every layer, and what the optimizer holds."""
    found: dict[str, Any] = {
        f"{type(layer).__name__} {number}": (layer.built, layer.get_build_config(), layer._called, layer.path)
        for number, layer in enumerate(model._flatten_layers())
    }
    found["weights"] = [(each.path, tuple(each.shape), each.trainable) for each in model.weights]
    found["optimizer"] = [(each.path, tuple(each.shape)) for each in model.optimizer.variables]
    return found


@pytest.mark.parametrize(("kind", "way", "first"), GRID)
def test_model_with_scopes_is_built_as_by_keras(kind: str, way: str, first: str, tmp_path: Path) -> None:
    plain = describe_state(train_model(kind, "plain", first))
    model = train_model(kind, way, first)
    assert describe_state(model) == plain
    x = MODELS[kind][1]
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras", compile=first in ("fit", "train_on_batch"))
    loaded.run_eagerly = True
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-6, atol=1e-6)


def test_model_with_scopes_has_the_initial_values_of_the_uncut_model() -> None:
    plain, cut = (train_model("drawn", way, "fit", 0.0).get_weights() for way in ("plain", "scopes"))
    assert [each.tobytes() for each in cut] == [each.tobytes() for each in plain]


# -------------------- The wrapper on Keras handles models with scopes, and no others
layers = keras.layers
INPUTS, TARGETS = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def _hook() -> Any:
    return importlib.import_module("whale_nebula.runtime.keras_hook")


@pytest.fixture
def unwrapped_keras() -> Any:
    unwrap_keras()
    yield
    wrap_keras(_hook)


def plain() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


class Subclass(keras.Model):
    def __init__(self, scoped: bool = False) -> None:
        super().__init__()
        self.dense, self.scoped = layers.Dense(2), scoped

    def call(self, x: Any) -> Any:
        if not self.scoped:
            return self.dense(x)
        with nb.cluster(), nb.stage(cluster="a"):
            return self.dense(x)


def test_absent_parts_of_a_batch_have_the_configured_specs() -> None:
    nb.shutdown()
    batch = {"a": INPUTS, "b": None}
    with nb.init({"inputs": {"x/b": {"shape": [16, None], "dtype": "int32"}}}):
        found = _make_keras_tensors(batch)
        assert (found["a"].shape, found["b"].shape, found["b"].dtype) == ((None, 3), (None, None), "int32")
        assert _make_keras_tensors({"a": INPUTS, "c": None})["c"] is None
        assert _make_keras_tensors(None)["b"].shape == (None, None)


def list_functions(model: keras.Model) -> list[Any]:
    model.fit(INPUTS, TARGETS, verbose=0)
    model.evaluate(INPUTS, TARGETS, verbose=0)
    model.predict(INPUTS, verbose=0)
    return [model.train_function, model.test_function, model.predict_function]


def test_models_without_scopes_use_keras_functions(unwrapped_keras: Any) -> None:
    own = {type(f).__name__ + f.__module__ + f.__qualname__ for f in list_functions(plain())}
    wrap_keras(_hook)
    assert {type(f).__name__ + f.__module__ + f.__qualname__ for f in list_functions(plain())} == own


def test_subclasses_without_scopes_use_keras_functions() -> None:
    model = Subclass()
    model.compile("sgd", "mse")
    assert not any("whale_nebula" in f.__module__ for f in list_functions(model))


@pytest.mark.parametrize("kind", ["train", pytest.param("test", marks=pytest.mark.grid), "predict"])
def test_subclass_with_scopes_is_detected_on_its_first_batch(kind: str) -> None:
    nb.shutdown()
    model = Subclass(scoped=True)
    model.compile("sgd", "mse")
    {"train": lambda: model.fit(INPUTS, TARGETS, verbose=0), "test": lambda: model.evaluate(INPUTS, TARGETS, verbose=0),
     "predict": lambda: model.predict(INPUTS, verbose=0)}[kind]()  # fmt: skip
    assert tuple(nb.last_report().stages) == ("a",)
    nb.shutdown()
