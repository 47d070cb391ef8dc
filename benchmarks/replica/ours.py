"""Two replicas of a perceptron, each in a process: `nb.replica()` around the model, in a custom loop or in `fit`.

ours.py loop|fit PORT
"""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from step_server import LAYERS, ROWS, WIDTH, blocks, serve

import whale_nebula as nb

tf.config.threading.set_intra_op_parallelism_threads(1)
RATE = 1e-3


def serve_loop(port: int, name: str, x: Any, y: Any) -> None:
    weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), [n, 0]) / WIDTH**0.5) for n in range(LAYERS)]

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with nb.cluster(), nb.replica(2), tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.nn.relu(hidden @ weight)
            loss = tf.reduce_mean((hidden - y) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    x, y = tf.constant(x), tf.constant(y)
    serve(port, name, lambda: float(step(x, y)))


def serve_fit(port: int, name: str, x: Any, y: Any) -> None:
    inputs = tensor = keras.Input((WIDTH,))
    with nb.cluster(), nb.replica(2):
        for _ in range(LAYERS):
            tensor = keras.layers.Dense(WIDTH, activation="relu", use_bias=False)(tensor)
    model = keras.Model(inputs, tensor)
    model.compile(keras.optimizers.SGD(RATE), "mse")
    dataset = tf.data.Dataset.from_tensors((x, y)).cache().repeat()
    for count, send in blocks(port, name):
        times = _StepTimes()
        model.fit(dataset, steps_per_epoch=count + 1, epochs=1, verbose=0, callbacks=[times])
        send(list(np.diff(times.ends)))


class _StepTimes(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    nb.init()
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((2 * ROWS, WIDTH)).astype("float32") for _ in range(2))
    {"loop": serve_loop, "fit": serve_fit}[kind](port, f"{kind} {nb.here().worker}", x, y)


main()
