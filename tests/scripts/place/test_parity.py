"""A placed model trains like the same model without a place, whatever kind it is."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.parity.compare import assert_parity
from tests.parity.zoo import Cut, Outcome, Trial, data, fit
from tests.scripts.place.models import BOTH, SCRIPTS, Script
from whale_nebula.errors import BatchCoupledError
from whale_nebula.strategies import by_parameters

EPOCHS, BATCH, RATE = 1, 12, 1e-2
STEPS = 3


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    nb.shutdown()
    yield
    nb.shutdown()


def placed(script: Script, micro_batches: int) -> Any:
    model = script.model()
    with nb.cluster(), nb.pipeline(micro_batches):
        nb.place(model, script.map(model))
    return model


def train(model: Any, cut: Cut, script: Script) -> Outcome:
    return fit(model, cut, script.x, script.y, epochs=EPOCHS, batch_size=BATCH)


@functools.cache
def uncut(build: Callable[[], Any]) -> Outcome:
    script = next(script for script in SCRIPTS.values() if script.build is build)
    return train(script.model(), Cut(0), script)


def check(script: Script, found: Outcome) -> None:
    assert found.stages == ("gpu", "npu")
    assert nb.last_report().micro_batches == script.micro_batches
    assert_parity(uncut(script.build), found, Trial(lambda cut: found, rate=RATE, steps=STEPS))


GRID = ("parts of a nested one", "tied in one place", "by parameters", "sequential", "called by its train_step")
"""Other maps of models that stand here already: `--grid` alone."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.grid if name in GRID else ()) for name in SCRIPTS]
)
def test_it_trains_like_the_uncut_model(name: str) -> None:
    script = SCRIPTS[name]
    check(script, train(placed(script, script.micro_batches), Cut(2), script))


def test_it_does_over_a_line_that_takes_time() -> None:
    script = SCRIPTS["nested"]
    nb.init(links="10gbit,0ms")
    check(script, train(placed(script, script.micro_batches), Cut(2), script))


def test_all_that_can_be_done_with_a_model_goes_by_its_place() -> None:
    script = SCRIPTS["nested"]
    model, plain = placed(script, 2), script.model()
    assert nb.plan(model, script.x, script.y).stages["gpu"].cluster == "gpu"
    assert nb.verify(model, script.x, script.y).ok
    np.testing.assert_allclose(
        model.predict(script.x, verbose=0), plain.predict(script.x, verbose=0), rtol=1e-5, atol=1e-6
    )
    assert (nb.last_report().program, *nb.last_report().stages) == (f"{model.name}.predict_step", "gpu", "npu")
    assert model.evaluate(script.x, script.y, verbose=0) == pytest.approx(
        plain.evaluate(script.x, script.y, verbose=0), rel=1e-5
    )
    assert (nb.last_report().program, *nb.last_report().stages) == (f"{model.name}.test_step", "gpu", "npu")


@pytest.fixture
def float64() -> Iterator[None]:
    """In single precision what BatchNorm makes of a rounding error would be larger than the tolerance."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


@pytest.mark.usefixtures("float64")
@pytest.mark.grid
def test_an_applications_model_is_placed_as_keras_makes_it() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.applications.MobileNet(input_shape=(32, 32, 3), weights=None, classes=3, alpha=0.25, dropout=0.0)
    model.compile("sgd", "mse")
    x, y = data(6, 32, 32, 3), data(6, 3, seed=1)
    nb.place(model, by_parameters(model, BOTH))
    found = nb.verify(model, x, y)
    assert found.ok, found
    assert "2 stages (gpu, npu)" in str(found)
    with nb.cluster(), nb.pipeline(2):
        nb.place(model, {"conv1.*|conv_pw_1": "gpu", "conv_preds": "npu"})
    with pytest.raises(BatchCoupledError, match="rows depend on each other"):
        nb.plan(model, x, y)
