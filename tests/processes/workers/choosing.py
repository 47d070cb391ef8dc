"""Worker: leave the codec to the line, and steps with a NaN out; tell what changed in which step, and what is left."""

import logging
import sys
from typing import Any

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.telling import bits, tell
from whale_nebula.runtime.step import estimates

STEPS, ROWS, WIDTH = 4, 8, 32


def told(first: str, second: str) -> None:
    """Train twice: once over a line that is slow and then free again, once with a batch that has a NaN."""
    drawn = np.random.default_rng(0)
    x, y = drawn.standard_normal((ROWS, 5)).astype("float32"), drawn.standard_normal((ROWS, 2)).astype("float32")
    bad = x.copy()
    bad[-1, 0] = np.nan
    model = _model(first, second, codec="auto")
    _line(1e4)
    tell("auto", _trained(model, [x] * STEPS, y))
    _line(None)
    tell("free again", _trained(model, [x] * 7, y))  # it looks in the first, the third and the eleventh step
    model = _model(first, second, rank=4, int8=True, nonfinite="skip")
    tell("left out", _trained(model, [x, bad, x, x], y))


def _line(rate: float | None) -> None:
    """Let every line have this rate, and stages compute a millisecond a step: what a test can foresee."""
    estimates.Seen._rate = lambda self, name: rate  # type: ignore[method-assign]
    estimates.slowest = lambda medians, count: 1e-3 if medians else None  # type: ignore[assignment]


def _model(first: str, second: str, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    with nb.cluster(), nb.pipeline(2), nb.compress(**options):
        with nb.stage(cluster=first):
            hidden = keras.layers.Dense(WIDTH, activation="tanh")(inputs)
        with nb.stage(cluster=second):
            model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile("adam", "mse")
    return model


def _trained(model: keras.Model, batches: list[Any], y: Any) -> dict[str, Any]:
    """What both sides must say alike: the notes of each step but for the reasons of who chose, and what is left."""
    losses, notes = [], []
    for x in batches:
        losses.append(float(model.train_on_batch(x, y)).hex())
        notes.append([note for note in nb.last_report().notes if ": auto " not in note])
    return {"losses": losses, "notes": notes, "weights": bits(model.get_weights())}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    nb.init()
    told(*sys.argv[1:])
