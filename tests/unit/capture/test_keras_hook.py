"""The wrapper on Keras handles models with scopes, and no others."""

import importlib
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.runtime.keras_hook import _form
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.keras_import import unwrap_keras, wrap_keras

layers = keras.layers
X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def _hook() -> Any:
    return importlib.import_module("whale_nebula.runtime.keras_hook")


@pytest.fixture
def unwrapped() -> Any:
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


def test_a_batch_with_parts_that_are_not_here_has_the_form_in_the_config() -> None:
    nb.shutdown()
    batch = {"a": X, "b": None}
    with nb.init({"inputs": {"x/b": {"shape": [16, None], "dtype": "int32"}}}):
        found = _form(batch)
        assert (found["a"].shape, found["b"].shape, found["b"].dtype) == ((None, 3), (None, None), "int32")
        assert _form({"a": X, "c": None})["c"] is None
        assert _form(None)["b"].shape == (None, None)


def functions(model: keras.Model) -> list[Any]:
    model.fit(X, Y, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    return [model.train_function, model.test_function, model.predict_function]


def test_models_without_scopes_get_keras_own_functions(unwrapped: Any) -> None:
    own = {type(f).__name__ + f.__module__ + f.__qualname__ for f in functions(plain())}
    wrap_keras(_hook)
    assert {type(f).__name__ + f.__module__ + f.__qualname__ for f in functions(plain())} == own


def test_subclasses_without_scopes_get_keras_own_functions() -> None:
    model = Subclass()
    model.compile("sgd", "mse")
    assert not any("whale_nebula" in f.__module__ for f in functions(model))


def test_the_wrapper_is_reversible(unwrapped: Any) -> None:
    trainer = vars(tf_private.TensorFlowTrainer)
    originals = {kind: trainer[f"make_{kind}_function"] for kind in ("train", "test", "predict")}
    assert not any(hasattr(f, "nebula_original") for f in originals.values())
    wrap_keras(_hook)
    wrap_keras(_hook)
    for kind, original in originals.items():
        wrapper = vars(tf_private.TensorFlowTrainer)[f"make_{kind}_function"]
        assert wrapper.nebula_original is original
        assert wrapper.__doc__ == original.__doc__
    unwrap_keras()
    assert {kind: vars(tf_private.TensorFlowTrainer)[f"make_{kind}_function"] for kind in originals} == originals


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_a_subclass_with_scopes_is_found_on_its_first_batch(kind: str) -> None:
    nb.shutdown()
    model = Subclass(scoped=True)
    model.compile("sgd", "mse")
    {"train": lambda: model.fit(X, Y, verbose=0), "test": lambda: model.evaluate(X, Y, verbose=0),
     "predict": lambda: model.predict(X, verbose=0)}[kind]()  # fmt: skip
    assert tuple(nb.last_report().stages) == ("a",)
    nb.shutdown()
