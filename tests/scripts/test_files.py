"""Files saved under one plan are loaded under another plan or none, weights and optimizer, and training continues.

Seeds are not in Keras's files: a loaded model's dropout begins anew, under a plan and without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.parity_harness import Cut, data

pytestmark = pytest.mark.filterwarnings("ignore::whale_nebula.errors.NebulaWarning")
CUTS = {"none": Cut(0), "two": Cut(2, 1), "two cut": Cut(2, 2), "three": Cut(3, 1)}
X, Y = data(24, 6), data(24, 3, seed=1)


def build_model(cut: Cut, seed: int) -> Any:
    """The same model under a plan or none; only what is loaded makes it the same."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = keras.layers.Dense(8, activation="tanh", name="first")(inputs)
        with cut.at(1):
            hidden = keras.layers.Dense(8, activation="gelu", name="second")(hidden)
        with cut.at(2):
            outputs = keras.layers.Dense(3, name="third")(hidden)
    model = keras.Model(inputs, outputs, name="filed")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model


def train(model: Any) -> dict[str, list[float]]:
    return model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history


def list_state(model: Any) -> list[np.ndarray]:
    """Weights, and what the optimizer holds."""
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("two cut", "three"),
        *(pytest.param(*each, marks=pytest.mark.grid) for each in (("none", "two"), ("two", "none"), ("three", "two"))),
    ],
)
def test_weights_load_into_another_plan(before: str, after: str, tmp_path: Path) -> None:
    """The second goes on where the first was."""
    first, second, uncut = build_model(CUTS[before], 1), build_model(CUTS[after], 2), build_model(CUTS["none"], 1)
    train(first)
    first.save_weights(tmp_path / "model.weights.h5")
    train(second)  # builds the optimizer, and makes it another model
    second.load_weights(tmp_path / "model.weights.h5")
    train(uncut)
    expected, found = train(uncut), train(second)
    assert {key: pytest.approx(values, rel=1e-5) for key, values in expected.items()} == found
    for a, b in zip(list_state(uncut), list_state(second), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("before", ["two cut", pytest.param("three", marks=pytest.mark.grid)])
def test_saved_model_equals_the_uncut_one(before: str, tmp_path: Path) -> None:
    model = build_model(CUTS[before], 1)
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(list_state(model), list_state(loaded), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
    assert {k: pytest.approx(v, rel=1e-5) for k, v in train(model).items()} == train(loaded)
