"""A large classifier on the workers of a cluster: replicated, or with its classifier sharded; or uncut. If it is
sharded `alone`, there are no replicas: each worker computes the body for all rows.

ours.py replica|split|alone|uncut CLASSES DOOR
"""

from __future__ import annotations

import contextlib
import sys

import keras
import tensorflow as tf
from task import RATE, compute_loss, make_batch, make_body, measure_peak_mib, serve

import whale_nebula as nb

kind, classes, door = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tf.config.threading.set_intra_op_parallelism_threads(1)
if kind != "uncut":
    nb.init()
x, y = make_batch(classes)
before = measure_peak_mib()
body, head = make_body(), keras.layers.Dense(classes, use_bias=False, name="head")
optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
none = contextlib.nullcontext


def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with none() if kind == "uncut" else nb.cluster(["a"]), tf.GradientTape() as tape:
        with nb.replica() if kind in ("replica", "split") else none():
            hidden = x
            for layer in body:
                hidden = layer(hidden)
            if kind == "replica":
                loss = compute_loss(head(hidden), y)
        if kind != "replica":
            with none() if kind == "uncut" else nb.split():
                loss = compute_loss(head(hidden), y)
    weights = [weight for layer in (*body, head) for weight in layer.trainable_variables]
    optimizer.apply(tape.gradient(loss, weights), weights)
    return loss


step = (tf.function if kind == "uncut" else nb.function)(train)
serve(door, kind, lambda: float(step(x, y)), before)
