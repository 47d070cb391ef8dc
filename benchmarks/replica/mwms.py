"""The same training by `tf.distribute.MultiWorkerMirroredStrategy`, in a custom loop.

TF_CONFIG=... mwms.py PORT INDEX
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf
from step_server import LAYERS, ROWS, WIDTH, serve

port, index = int(sys.argv[1]), int(sys.argv[2])
tf.config.threading.set_intra_op_parallelism_threads(1)
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
with strategy.scope():
    weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), [n, 0]) / WIDTH**0.5) for n in range(LAYERS)]
rng = np.random.default_rng(index)
x, y = (tf.constant(rng.standard_normal((ROWS, WIDTH)).astype("float32")) for _ in range(2))


def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        hidden = x
        for weight in weights:
            hidden = tf.nn.relu(hidden @ weight)
        loss = tf.reduce_mean((hidden - y) ** 2) / 2
    context = tf.distribute.get_replica_context()
    gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, tape.gradient(loss, weights), options)

    def update(strategy: tf.distribute.StrategyExtended, gradients: list[tf.Tensor]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            strategy.extended.update(weight, lambda w, g: w.assign_sub(1e-3 * g), args=(gradient,), group=False)

    context.merge_call(update, args=(gradients,))
    return context.all_reduce(tf.distribute.ReduceOp.SUM, loss, options)


@tf.function
def step() -> tf.Tensor:
    return strategy.run(replica, args=(x, y))


serve(port, f"mwms {index}", lambda: float(step()))
