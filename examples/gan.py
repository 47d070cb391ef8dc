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
discriminator = keras.Sequential([keras.Input((2,)), layers.Dense(32, activation="leaky_relu"), layers.Dense(1)])
generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
discriminator_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)


def generate(noise):
    with nb.stage(cluster="gpu"):
        return generator(noise)


def discriminate(points):
    with nb.stage(cluster="npu"):
        return discriminator(points)


def compute_loss(scores, real):
    """The cross-entropy of the discriminator's scores for points that are `real`, or that are not."""
    return tf.reduce_mean(tf.nn.softplus(-scores if real else scores))


@nb.function
def step(real, noise, again):
    with nb.cluster(), nb.pipeline(micro_batch=2):
        with tf.GradientTape() as tape:
            real_loss = compute_loss(discriminate(real), True)
            discriminator_loss = real_loss + compute_loss(discriminate(generate(noise)), False)
        gradients = tape.gradient(discriminator_loss, discriminator.trainable_variables)
        discriminator_optimizer.apply_gradients(zip(gradients, discriminator.trainable_variables, strict=True))
        with tf.GradientTape() as tape:  # the discriminator has been updated
            loss = compute_loss(discriminate(generate(again)), True)
        gradients = tape.gradient(loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
    return loss, discriminator_loss


batches = [part.astype("float32") for part in (reals, *noises)]
print(nb.plan(step, *(part[0] for part in batches)))
for number in range(STEPS):
    loss, discriminator_loss = step(*(part[number] for part in batches))
with nb.gathered():
    radius = float(np.mean(np.linalg.norm(generator(batches[1][0]), axis=1)))
print(f"loss {float(loss):.6f}, of the discriminator {float(discriminator_loss):.6f}, mean radius {radius:.3f}")
