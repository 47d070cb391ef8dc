"""`nb.place` with `nb.split` for layers whose code is not the user's: the same plan as with scopes."""

from __future__ import annotations

import keras
import pytest

import whale_nebula as nb
from tests.same import data

layers = keras.layers


def model() -> keras.Model:
    inner = keras.Sequential([layers.Dense(12, name="wide"), layers.Dense(6, name="narrow")], name="body")
    inputs = keras.Input((4,))
    found = keras.Model(inputs, layers.Dense(8, name="head")(inner(inputs)))
    found.compile("sgd", "mse")
    return found


def test_patterns_divide_the_variables_of_layers() -> None:
    placed = model()
    with nb.cluster():
        nb.place(placed, {"body": "gpu", "head": "npu", "body/wide": nb.split(2), "he.+": nb.split(2, axis=0)})
    plan = nb.plan(placed, data(6, 4), data(6, 8))
    kernels = {path: layout for path, layout in plan.layouts.items() if path.endswith("kernel")}
    assert kernels == {"body/wide/kernel": "split(1)", "head/kernel": "split(0)", "body/narrow/kernel": "split(0)"}


def test_it_trains_as_the_whole_model() -> None:
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


def test_a_pattern_without_layers_is_an_error() -> None:
    with nb.cluster(), pytest.raises(nb.errors.PlacementError, match="matches 'heat'"):
        nb.place(model(), {"body": "gpu", "heat": nb.split(2)})
