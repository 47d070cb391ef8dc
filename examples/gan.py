"""A GAN in two clusters: the generator in one, the discriminator in the other, both trained in one step.

The step uses two tapes, the second one after the first update, so the plan has two phases. Without the lines with `nb`,
and with `@tf.function` instead, this is plain TensorFlow with the same results.
"""

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb

BATCH, STEPS, NOISE = 64, 150, 4
keras.utils.set_random_seed(1)

# Real data are points around a circle; the generator creates points from noise.
random = np.random.default_rng(0)
angle = random.uniform(0.0, 2.0 * np.pi, (STEPS, BATCH))
reals = np.stack([np.cos(angle), np.sin(angle)], axis=2) + 0.05 * random.normal(size=(STEPS, BATCH, 2))
noises = random.normal(size=(2, STEPS, BATCH, NOISE))

layers = keras.layers
generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(32, activation="relu"), layers.Dense(2)])
judge = keras.Sequential([keras.Input((2,)), layers.Dense(32, activation="leaky_relu"), layers.Dense(1)])
makes, judges = keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(2e-3, beta_1=0.5)


def made(noise):
    with nb.stage(cluster="gpu"):
        return generator(noise)


def judged(points):
    with nb.stage(cluster="npu"):
        return judge(points)


def surprise(scores, real):
    """The discriminator's loss for real (or generated) points."""
    return tf.reduce_mean(tf.nn.softplus(-scores if real else scores))


@nb.function
def step(real, noise, again):
    with nb.cluster(), nb.pipeline(micro_batch=2):
        with tf.GradientTape() as tape:
            judge_loss = surprise(judged(real), True) + surprise(judged(made(noise)), False)
        gradients = tape.gradient(judge_loss, judge.trainable_variables)
        judges.apply_gradients(zip(gradients, judge.trainable_variables, strict=True))
        with tf.GradientTape() as tape:  # the discriminator has been updated
            loss = surprise(judged(made(again)), True)
        gradients = tape.gradient(loss, generator.trainable_variables)
        makes.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
    return loss, judge_loss


batches = [part.astype("float32") for part in (reals, *noises)]
print(nb.plan(step, *(part[0] for part in batches)))
for number in range(STEPS):
    loss, judge_loss = step(*(part[number] for part in batches))
with nb.gathered():
    radius = float(np.mean(np.linalg.norm(generator(batches[1][0]), axis=1)))
print(f"loss {float(loss):.6f}, of the discriminator {float(judge_loss):.6f}, mean radius {radius:.3f}")
