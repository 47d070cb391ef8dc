"""Worker: a few steps of gradient descent, all told to one file of metrics, which is the argument."""

import sys
from typing import Any

import tensorflow as tf

import whale_nebula as nb
from tests.processes.telling import tell

STEPS = 4

nb.init(links="1mbit,0ms", metrics=sys.argv[1])
kernels = [tf.Variable(tf.ones([8, 8]) / 8) for _ in range(2)]


@nb.function
def step(x: Any) -> Any:
    with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="c0"):
            hidden = tf.tanh(x @ kernels[0])
        with nb.stage(cluster="c1"), nb.compress(int8=True):
            loss = tf.reduce_mean(tf.square(hidden @ kernels[1]))
    for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
        kernel.assign_sub(0.1 * gradient)
    return {"loss": loss}


for _ in range(STEPS):
    step(tf.ones([4, 8]))
report = nb.last_report()
tell("worker", report.worker)
tell("stages", list(report.stages))
tell("text", str(report))
nb.shutdown()
