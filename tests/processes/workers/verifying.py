"""Worker: two models and a loop are verified in several processes, and what that leaves of them is told."""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.telling import tell

ROWS = 12


def built(inner: str = "relu") -> keras.Model:
    """Two stages, a weight of both clusters, dropout of one, and Adam's slots."""
    inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(micro_batch=3 if inner == "relu" else 2):
        with nb.stage(cluster="c0"):
            hidden = keras.layers.Dense(8, inner, name="first")(inputs)
        with nb.stage(cluster="c1"):
            outputs = keras.layers.Dense(2, name="second")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5, name="adam"), "mse", metrics=["mae"])
    return model


def batch(seed: int) -> tuple[Any, Any]:
    """Rows that every process makes alike."""
    random = np.random.default_rng(seed)
    return random.normal(size=(ROWS, 6)).astype("float32"), random.normal(size=(ROWS, 2)).astype("float32")


@tf.custom_gradient
def coupled(x: Any) -> Any:
    """A gradient that hangs on how many rows it sees, which no plan can know."""

    def back(upstream: Any) -> Any:
        return upstream * tf.cast(tf.shape(x)[0], x.dtype)

    return tf.tanh(x), back


def told() -> None:
    """Train, verify, train on."""
    model = built()
    model.fit(*batch(1), batch_size=ROWS, epochs=2, verbose=0)
    before = model.get_weights()
    found = nb.verify(model, *batch(2))
    tell("text", str(found))
    tell("ok", found.ok)
    tell("names", [row.name for row in found.rows])
    tell("as before", all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)))
    try:
        tell("first is empty", len(model.get_layer("first").kernel.numpy()) == 0)
    except nb.errors.CollectiveReadError:
        tell("first is empty", True)
    history = model.fit(*batch(3), batch_size=ROWS, verbose=0).history
    tell("loss", history["loss"][0])
    tell("wrong", nb.verify(built(coupled), *batch(2)).ok)


if __name__ == "__main__":
    nb.init(links="10gbit,0ms")
    told()
    nb.shutdown()
    sys.exit(0)
