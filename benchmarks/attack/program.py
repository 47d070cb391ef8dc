"""The attacked run: a model in two clusters; prints the begin of each step and the result."""

from __future__ import annotations

import hashlib
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from benchmarks.attack.attacks import STEPS_STARTED

ROWS, WIDTH = 256, 1024


def main(steps: int) -> None:
    """Train `steps` steps; the boundary is a megabyte in each direction."""
    keras.utils.set_random_seed(3)
    nb.init()
    data = np.random.default_rng(0)
    inputs = keras.Input((64,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(WIDTH, activation="tanh")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(16)(keras.layers.Dropout(0.1)(hidden))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.Adam(0.001)

    @nb.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    started_at, loss = [], 0.0
    for _ in range(steps):
        x, y = data.standard_normal((2, ROWS, 64), np.float32)
        started_at.append(time.time())
        loss = float(step(x, y[:, :16]))
        if len(started_at) == 10:
            print(STEPS_STARTED, flush=True)
    started_at.append(time.time())
    digest = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in model.get_weights())).hexdigest()
    print(json.dumps({"site": "", "began": started_at, "loss": loss.hex(), "weights": digest}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
