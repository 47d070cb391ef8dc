"""The same training by `tf.distribute.MultiWorkerMirroredStrategy`, in a custom loop.

TF_CONFIG=... mwms.py CLASSES DOOR INDEX
"""

from __future__ import annotations

import sys
from itertools import pairwise

import tensorflow as tf
from task import FEATURES, HIDDEN, INPUTS, RATE, ROWS, compute_loss, make_batch, measure_peak_mib, serve

classes, door, index = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tf.config.threading.set_intra_op_parallelism_threads(1)
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
before = measure_peak_mib()
with strategy.scope():
    widths = [INPUTS, *HIDDEN]
    shapes = [*pairwise(widths), (FEATURES, classes)]
    weights = [tf.Variable(tf.random.stateless_normal(shape, [n, 0]) * 0.02) for n, shape in enumerate(shapes)]
    speeds = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
x, y = make_batch(classes, ROWS // 2, index)


def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        hidden = x
        for weight in weights[:-1]:
            hidden = tf.nn.relu(hidden @ weight)
        loss = compute_loss(hidden @ weights[-1], y) / 2
    context = tf.distribute.get_replica_context()
    gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, tape.gradient(loss, weights), options)

    def update(strategy: tf.distribute.StrategyExtended, gradients: list[tf.Tensor]) -> None:
        for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
            strategy.extended.update(speed, lambda s, g: s.assign(0.9 * s - RATE * g), args=(gradient,), group=False)
            strategy.extended.update(weight, lambda w, s: w.assign_add(s), args=(speed,), group=False)

    context.merge_call(update, args=(gradients,))
    return context.all_reduce(tf.distribute.ReduceOp.SUM, loss, options)


@tf.function
def step() -> tf.Tensor:
    return strategy.run(replica, args=(x, y))


serve(door, f"mwms {index}", lambda: float(step()), before)
