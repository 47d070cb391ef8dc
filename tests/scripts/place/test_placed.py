"""Other uses of a placed model; tests/parity verifies that it trains like the uncut one."""

from collections.abc import Iterator

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.parity_harness import data
from tests.scripts.place.models import BOTH, PLACED
from whale_nebula.errors import BatchCoupledError
from whale_nebula.strategies import by_parameters


def test_placed_model_is_placed_in_every_use() -> None:
    script = PLACED["nested"]
    model, plain = script.placed(2), script.model()
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
def float64_default() -> Iterator[None]:
    """In single precision what BatchNorm makes of a rounding error would be larger than the tolerance."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


@pytest.mark.usefixtures("float64_default")
@pytest.mark.grid
def test_keras_applications_model_is_placed() -> None:
    keras.utils.clear_session(free_memory=False)
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
