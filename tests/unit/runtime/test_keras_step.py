"""The structure of a Keras batch, if the config's `inputs` names parts that are None."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import AbsentInputError
from whale_nebula.runtime.keras import _arguments

FORM = {"shape": [None, 2]}
X, Y, W = tf.zeros([4, 2]), tf.ones([4, 2]), tf.ones([4])


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[None]:
    with nb.init({"inputs": dict.fromkeys(request.param, FORM)}):
        yield


CASES: list[tuple[list[str], str, Any, list[str]]] = [
    ([], "train", X, ["x"]),
    ([], "train", (X, Y), ["x", "y"]),
    ([], "train", (X, None, W), ["x", "sample_weight"]),
    (["y"], "train", X, ["x", "y"]),
    (["y"], "test", (X,), ["x", "y"]),
    (["y"], "predict", X, ["x"]),
    (["y/a", "y/b"], "train", X, ["x", "y"]),
    (["y"], "train", (X, None), ["x", "y"]),
    (["x"], "train", (None, Y), ["x", "y"]),
    (["sample_weight"], "train", (X, Y), ["x", "y", "sample_weight"]),
    (["y"], "train", (X, None, W), ["x", "y", "sample_weight"]),
    (["yonder"], "train", X, ["x"]),
]


@pytest.mark.parametrize(("run", "kind", "data", "names"), CASES, indirect=["run"])
@pytest.mark.usefixtures("run")
def test_parts_that_the_config_names_are_there(kind: str, data: Any, names: list[str]) -> None:
    arguments, unpack = _arguments(data, kind)
    assert [name for name, _ in arguments] == names
    (given,), _ = unpack([name.upper() for name in names])
    parts = given if isinstance(given, tuple) else (given,)
    assert [part for part in parts if part is not None] == [name.upper() for name in names]


@pytest.mark.parametrize("run", [["y"]], indirect=True)
@pytest.mark.usefixtures("run")
def test_an_optional_that_is_empty_is_a_none() -> None:
    arguments, _ = _arguments((X, tf.experimental.Optional.empty(None)), "train")
    assert arguments[1] == ("y", None)


@pytest.mark.parametrize("run", [["x/b", "y"]], indirect=True)
@pytest.mark.usefixtures("run")
def test_in_one_process_all_of_a_batch_is_given() -> None:
    inputs = {name: keras.Input((2,), name=name) for name in ("a", "b")}
    with nb.cluster(), nb.stage(cluster="gpu"):
        outputs = keras.layers.Dense(2)(inputs["a"] + inputs["b"])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    array = np.ones((4, 2), "float32")
    with pytest.raises(AbsentInputError, match="input 'x/b' is None, and all clusters are in this process"):
        model.fit({"a": array, "b": None}, array, verbose=0)
    with pytest.raises(AbsentInputError, match="input 'y' is None"):
        model.fit({"a": array, "b": array}, verbose=0)
    assert model.predict({"a": array, "b": array}, verbose=0).shape == (4, 2)
    assert np.isfinite(model.fit({"a": array, "b": array}, array, verbose=0).history["loss"][0])
