"""Worker: train a model whose boundary is projected on a learned basis; tell what it left."""

import sys

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.telling import bits, sent, tell


def told(first: str, second: str) -> None:
    """Three steps with Adam, and a prediction."""
    inputs = keras.Input((5,))
    with nb.cluster(), nb.pipeline(2), nb.compress(rank=3, basis="learned", backward=None):
        with nb.stage(cluster=first):
            hidden = keras.layers.Dense(8, activation="tanh", name="first")(inputs)
        with nb.stage(cluster=second):
            model = keras.Model(inputs, keras.layers.Dense(2, name="second")(hidden), name="projected")
    model.compile("adam", "mse")
    drawn = np.random.default_rng(0)
    x, y = drawn.standard_normal((6, 5)).astype("float32"), drawn.standard_normal((6, 2)).astype("float32")
    losses = model.fit(x, y, batch_size=2, shuffle=False, verbose=0).history["loss"]
    tell("sent", sent())
    tell("losses", [float(loss).hex() for loss in losses])
    tell("outputs", bits([model.predict(x, batch_size=6, verbose=0)]))
    tell("names", [variable.path for variable in model.trainable_variables])
    tell("weights", bits(model.get_weights()))


if __name__ == "__main__":
    nb.init()
    told(*sys.argv[1:])
