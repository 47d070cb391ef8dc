"""Train under TensorFlow's MultiWorkerMirroredStrategy, the counterpart of `kills_worker.py`: the same layers, saved
every two steps by `tf.train.CheckpointManager`; prints the times of events, and worker 1 dies after the given step.

Keras 3 does not train under this strategy, so its `fit` and `BackupAndRestore` are not available: the loop is
TensorFlow's.
"""

import json
import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf
from process_start import find_start

STARTED, IMPORTED = find_start(), time.time()
STEPS, WIDTH, ROWS = 40, 256, 32


def main(folder: str, dies: str, start: str) -> None:
    """Train from the newest checkpoint."""
    index = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    strategy, draw = tf.distribute.MultiWorkerMirroredStrategy(), np.random.default_rng(0)
    with strategy.scope():
        shapes = [(WIDTH, WIDTH)] * 6 + [(WIDTH, 1)]
        weights = [tf.Variable(draw.normal(0, 0.06, shape).astype("float32")) for shape in shapes]
        done = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(weights=weights, done=done), os.path.join(folder, str(index)), max_to_keep=2
    )
    newest = tf.train.latest_checkpoint(os.path.join(folder, "0"))
    if newest:
        manager.checkpoint.restore(newest)

    def learn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights[:-1]:
                hidden = tf.nn.relu(hidden @ weight)
            loss = tf.reduce_mean((hidden @ weights[-1] - y) ** 2)
        gradients = tf.distribute.get_replica_context().all_reduce("mean", tape.gradient(loss, weights))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return strategy.run(learn, (x, y))

    asked = time.time()
    for number in range(int(done.numpy()) + 1, STEPS + 1):
        x, y = (draw.normal(size=(ROWS // 2, width)).astype("float32") for width in (WIDTH, 1))
        step(tf.constant(x), tf.constant(y))
        done.assign(number)
        times = " ".join(f"{each:.3f}" for each in (time.time(), asked, STARTED, IMPORTED))
        print(f"EVENT step {index} {start} {number} {times}", flush=True)
        if number % 2 == 0:
            manager.save()
        if number == int(dies) and index == 1 and start == "0":
            print(f"EVENT dies {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
