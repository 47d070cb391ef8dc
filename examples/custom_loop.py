"""A custom training loop in two clusters: a tape, clipped gradients, an optimizer for each part, a metric.

Without the lines with `nb`, and with `@tf.function` instead, this is plain TensorFlow with the same results.
"""

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb

ROWS, BATCH, EPOCHS = 576, 64, 12
keras.utils.set_random_seed(1)

# The task: on which of the three arms of a spiral is a point?
random = np.random.default_rng(0)
arms, along = np.arange(ROWS) % 3, random.random(ROWS)
angle = 2.1 * arms + 4.0 * along + 0.1 * random.normal(size=ROWS)
points = (along[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)).astype("float32")

layers, gelu = keras.layers, "gelu"
encoder = keras.Sequential([keras.Input((2,)), layers.Dense(64, activation=gelu), layers.Dense(32, activation=gelu)])
decoder = keras.Sequential([keras.Input((32,)), layers.Dense(32, activation=gelu), layers.Dense(3)])
slow, fast = keras.optimizers.SGD(0.2, momentum=0.9), keras.optimizers.Adam(1e-2)
accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function  # inlined when it is called inside a step, so its scopes apply
def scores(x):
    with nb.stage(cluster="gpu"):
        hidden = encoder(x)
    with nb.stage(cluster="npu"):
        return decoder(hidden)


@nb.function
def train_step(x, y):
    with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batch=4):
        logits = scores(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    first, second = encoder.trainable_variables, decoder.trainable_variables
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, first + second), 1.0)
    slow.apply_gradients(zip(gradients[: len(first)], first, strict=True))
    fast.apply_gradients(zip(gradients[len(first) :], second, strict=True))
    accuracy.update_state(y, logits)
    return loss, norm


print(nb.plan(train_step, points[:BATCH], arms[:BATCH]))
for _ in range(EPOCHS):
    accuracy.reset_state()
    for start in range(0, ROWS, BATCH):
        loss, norm = train_step(points[start : start + BATCH], arms[start : start + BATCH])
print(f"loss {float(loss):.6f}, gradient norm {float(norm):.4f}, accuracy {float(accuracy.result()):.3f}")
