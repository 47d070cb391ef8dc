"""Worker: train with differences of samples for three epochs, in another order each; tell what crossed and was left."""

import sys

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.telling import bits, sent, tell
from whale_nebula.runtime.run import current_run


def told(first: str, second: str) -> None:
    """A model with ids beside its data."""
    x, ids = keras.Input((5,), name="x"), keras.Input((), dtype="int64", name="ids")
    with nb.cluster(), nb.pipeline(2), nb.compress(int4=True, delta="x/ids"):
        with nb.stage(cluster=first):
            hidden = keras.layers.Dense(96, activation="tanh")(x)
        with nb.stage(cluster=second):
            model = keras.Model({"x": x, "ids": ids}, keras.layers.Dense(2)(hidden), name="different")
    model.compile("adam", "mse")
    drawn = np.random.default_rng(0)
    data, y = drawn.standard_normal((10, 5)).astype("float32"), drawn.standard_normal((10, 2)).astype("float32")
    losses, crossed = [], []
    for _ in range(3):
        order = drawn.permutation(10)
        for batch in (order[:4], order[4:8], order[8:]):
            losses.append(float(model.train_on_batch({"x": data[batch], "ids": batch}, y[batch])).hex())
            crossed.append(sent())
    tell("losses", losses)
    tell("sent", crossed)
    tell("outputs", bits([model.predict({"x": data, "ids": np.arange(10)}, batch_size=10, verbose=0)]))
    tell("weights", bits(model.get_weights()))
    states = (state.held for _, state in sorted(current_run().channels.items()) if state.held is not None)
    tell("held", [bits(held.as_arrays().values()) for held in states])


if __name__ == "__main__":
    nb.init()
    told(*sys.argv[1:])
