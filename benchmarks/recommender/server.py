"""A DLRM under TensorFlow's ParameterServerStrategy in a custom loop: one coordinator, one worker, one parameter
server. run.py starts it, and it prints the rows trained a second. Arguments: the cluster as JSON, the job of this
process, rows of a batch, steps.

Its ids are numbered beforehand, so that its table is a variable of the right size; a step looks up distinct rows, and
updates only them, as whale_nebula does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.models.recommender import generated_clicks

FIELDS, NUMBERS, WIDTH, VALUES, ROWS, WARM = 8, 4, 16, 20_000, 65_536, 60
LAYERS = ((NUMBERS, 64), (64, WIDTH), (WIDTH + FIELDS * (FIELDS + 1) // 2, 64), (64, 32), (32, 1))
BELOW = [one * (FIELDS + 1) + other for one in range(FIELDS + 1) for other in range(one)]


def predict(numbers: Any, vectors: Any, weights: Any) -> Any:
    """The logits of `whale_nebula.models.recommender.dlrm`."""
    for at in (0, 1):
        numbers = tf.nn.relu(numbers @ weights[2 * at] + weights[2 * at + 1])
    joined = tf.concat([numbers[:, None], vectors], 1)
    products = tf.reshape(joined @ tf.transpose(joined, (0, 2, 1)), (-1, (FIELDS + 1) ** 2))
    hidden = tf.concat([numbers, tf.gather(products, BELOW, axis=1)], 1)
    for at in (2, 3, 4):
        hidden = hidden @ weights[2 * at] + weights[2 * at + 1]
        hidden = tf.nn.relu(hidden) if at < 4 else hidden
    return hidden


def coordinate(batch: int, steps: int) -> tuple[float, float]:
    """Train; returns rows a second, and the mean loss of the last steps."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    log = generated_clicks(ROWS, fields=FIELDS, numbers=NUMBERS, vocabulary=VALUES)
    known, ids = np.unique(log.ids, return_inverse=True)
    ids = ids.reshape(log.ids.shape).astype(np.int64)
    with strategy.scope():
        table = tf.Variable(tf.random.uniform((len(known), WIDTH), -0.05, 0.05))
        squares = tf.Variable(tf.fill((len(known), WIDTH), 0.1))
        init = tf.keras.initializers.GlorotUniform(seed=1)
        weights = [tf.Variable(make) for a, b in LAYERS for make in (init((a, b)), tf.zeros(b))]
        slots = [[tf.Variable(tf.zeros_like(each)) for each in weights] for _ in range(2)]
        count = tf.Variable(0.0)

    def rows() -> tf.data.Dataset:
        batches = [each.reshape(-1, batch, *each.shape[1:]) for each in (log.numbers, ids, log.clicked)]
        return tf.data.Dataset.from_tensor_slices(tuple(batches)).repeat().prefetch(2)

    def train(numbers: Any, ids: Any, clicked: Any) -> Any:
        distinct, places = tf.unique(tf.reshape(ids, [-1]))
        looked_up = tf.gather(table, distinct)
        read = [tf.convert_to_tensor(each) for each in weights]
        with tf.GradientTape() as tape:
            tape.watch([looked_up, *read])
            vectors = tf.reshape(tf.gather(looked_up, places), (-1, FIELDS, WIDTH))
            logits = predict(numbers, vectors, read)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits))
        of_rows, *of_weights = tape.gradient(loss, [looked_up, *read])
        sums = (
            tf.math.unsorted_segment_sum(of_rows.values, of_rows.indices, tf.size(distinct))
            if isinstance(of_rows, tf.IndexedSlices)
            else of_rows
        )
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=table.handle, accum=squares.handle, lr=0.1, epsilon=1e-7, grad=sums, indices=distinct
        )
        step = count.assign_add(1.0)
        for weight, mean, square, gradient in zip(weights, *slots, of_weights, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle, m=mean.handle, v=square.handle, beta1_power=0.9**step, beta2_power=0.999**step,
                lr=3e-3, beta1=0.9, beta2=0.999, epsilon=1e-7, grad=gradient,
            )  # fmt: skip
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(train, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(rows))
    for _ in range(WARM):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    began = time.perf_counter()
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
    coordinator.join()
    took = time.perf_counter() - began
    return batch * steps / took, float(np.mean([each.fetch() for each in losses[-20:]]))


def main() -> None:
    """Run as the process of the arguments."""
    cluster, job = json.loads(sys.argv[1]), sys.argv[2]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
    if job != "chief":
        tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=0, protocol="grpc").join()
    found, loss = coordinate(int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps({"rows a second": round(found), "loss": loss}), flush=True)
    os._exit(0)  # a coordinator's server cannot be stopped


main()
