"""Training with differences in one process: bytes, caches of both sides, and excluded cases."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.runtime.run import current_run

SAMPLES, BATCH, PARTS, WIDTH, EPOCHS = 24, 8, 2, 64, 3
ROWS = BATCH // PARTS
WHOLE = PARTS * (4 + 1 + ROWS * WIDTH * 2)
CHANGES = PARTS * payload_bytes("int8, delta ids", "float32", (ROWS, WIDTH))
THERE = "b0 a->b"
DRAWN = np.random.default_rng(0)
X, TRUE = DRAWN.standard_normal((SAMPLES, 6)).astype("float32"), DRAWN.standard_normal((6, 2)).astype("float32")
Y = np.tanh(X @ TRUE)
DATA = {"x": X, "ids": np.arange(100, 100 + SAMPLES)}


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    with nb.init(seed=1):
        yield


def held() -> list[dict[str, bytes]]:
    """What each side holds of samples."""
    states = current_run().channels.values()
    return [{k: v.tobytes() for k, v in s.held.as_arrays().items()} for s in states if s.held is not None]


def crossed() -> int:
    return nb.last_report().boundaries[THERE].payload_bytes


class TestKeras:
    def model(self, **options: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        x, ids = keras.Input((6,), name="x"), keras.Input((), dtype="int64", name="ids")
        with nb.cluster(), nb.pipeline(PARTS), nb.compress(**options):
            with nb.stage(cluster="a"):
                hidden = keras.layers.Dense(WIDTH, activation="tanh")(x)
            with nb.stage(cluster="b"):
                model = keras.Model({"x": x, "ids": ids}, keras.layers.Dense(2)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def fit(self, model: keras.Model) -> tuple[list[float], list[int]]:
        sizes: list[int] = []
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: sizes.append(crossed()))
        done = model.fit(DATA, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[seen])
        return done.history["loss"], sizes

    @pytest.mark.grid
    def test_three_epochs_with_differences_and_evaluation_between(self) -> None:
        model = self.model(int8=True, delta="x/ids")
        losses, sizes = self.fit(model)
        steps = SAMPLES // BATCH
        assert sizes == [WHOLE] * steps + [CHANGES] * (EPOCHS - 1) * steps
        first, second = held()
        assert first == second and len(first["ids"]) == SAMPLES * 8
        model.evaluate(DATA, Y, batch_size=BATCH, verbose=0)
        assert crossed() == PARTS * payload_bytes("int8", "float32", (ROWS, WIDTH))
        model.predict({**DATA, "ids": np.arange(SAMPLES)}, batch_size=BATCH, verbose=0)
        assert held() == [first, second]
        exact, _ = self.fit(self.model(fp16=True, backward=None))
        np.testing.assert_allclose(losses, exact, rtol=0.02)
        assert losses[-1] < losses[0]
