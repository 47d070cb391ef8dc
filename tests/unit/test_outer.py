"""Outer optimizers: pure functions of numbers."""

from __future__ import annotations

import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.errors import OptionError
from whale_nebula.ir.outer_optimizer import OUTER_BY_NAME, Average, Nesterov, format_outer


def test_average_of_differences_equals_average_of_weights() -> None:
    rng = np.random.default_rng(0)
    known, *clusters = rng.random((4, 50)).astype("float32")
    mean = np.mean([known - each for each in clusters], axis=0)
    new, _ = Average().update(known, mean, Average().init(known))
    np.testing.assert_allclose(new, np.mean(clusters, axis=0), rtol=1e-6)


def test_nesterov_matches_keras_sgd() -> None:
    import keras

    weight = keras.Variable(np.float32([1.0, -2.0]))
    theirs = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    ours, state = np.float32([1.0, -2.0]), Nesterov().init(np.zeros(2, "float32"))
    for gradient in np.random.default_rng(1).random((5, 2)).astype("float32"):
        theirs.apply([gradient], [weight])
        ours, state = Nesterov(rate=0.7, momentum=0.9).update(ours, gradient, state)
        np.testing.assert_allclose(ours, weight.numpy(), rtol=1e-5)


def test_update_does_not_modify_its_arguments() -> None:
    weights, gradient = np.ones(3, "float32"), np.ones(3, "float32")
    state = Nesterov().init(weights)
    Nesterov().update(weights, gradient, state)
    assert weights.tolist() == gradient.tolist() == [1.0] * 3
    assert state.tolist() == [0.0] * 3


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 3.0}, {"momentum": 1.0}, {"momentum": -0.1}], ids=str)
def test_nesterov_refuses_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="mend"):
        Nesterov(**options)


def test_outer_optimizers_are_public_and_named() -> None:
    assert nb.outer.Nesterov is Nesterov
    assert {name: format_outer(each) for name, each in OUTER_BY_NAME.items()} == {
        "nesterov": "nesterov",
        "average": "average",
    }
