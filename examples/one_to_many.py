"""One generator and three discriminators; the last one is twice as fast and gets half of the micro-batches.

Each discriminator trains on its share of a batch, and all of them are equal after each update. Without the lines
with `nb`, and with `@tf.function` instead, this is plain TensorFlow with the same results.

    whale-nebula run --all --config examples/one_to_many.yaml examples/one_to_many.py    # a process for each cluster
"""

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb

BATCH, STEPS, NOISE = 64, 100, 4
GPU = ["127.0.0.1:7100"]
NPU = ["127.0.0.1:7101", "127.0.0.1:7102", {"address": "127.0.0.1:7103", "speed": 2}]
nb.init({"clusters": {"gpu": {"workers": GPU}, "npu": {"workers": NPU}}})
keras.utils.set_random_seed(1)

# Real data are points around a circle; the generator creates points from noise.
random = np.random.default_rng(0)
angle = random.uniform(0.0, 2.0 * np.pi, (STEPS, BATCH))
reals = np.stack([np.cos(angle), np.sin(angle)], axis=2) + 0.05 * random.normal(size=(STEPS, BATCH, 2))
noises = random.normal(size=(STEPS, BATCH, NOISE))

layers = keras.layers
generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
discriminator = keras.Sequential([keras.Input((2,)), layers.Dense(64, activation="leaky_relu"), layers.Dense(1)])
generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
discriminator_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)


def compute_loss(scores, real):
    """The cross-entropy of the discriminator's scores for points that are `real`, or that are not."""
    return tf.reduce_mean(tf.nn.softplus(-scores if real else scores))


@nb.function
def step(real, noise):
    with nb.cluster(), tf.GradientTape(persistent=True) as tape:
        with nb.replica(1), nb.stage(cluster="gpu"):
            generated = generator(noise)
        with nb.replica(3), nb.stage(cluster="npu"):
            scores = discriminator(generated)
            discriminator_loss = compute_loss(discriminator(real), True) + compute_loss(scores, False)
            loss = compute_loss(scores, True)
    for model, optimizer, error in (
        (discriminator, discriminator_optimizer, discriminator_loss),
        (generator, generator_optimizer, loss),
    ):
        gradients = tape.gradient(error, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss, discriminator_loss


batches = [part.astype("float32") for part in (reals, noises)]
print(nb.plan(step, *(part[0] for part in batches)))
for number in range(STEPS):
    loss, discriminator_loss = step(*(part[number] for part in batches))
with nb.gathered():
    radius = float(np.mean(np.linalg.norm(generator(batches[1][0]), axis=1)))
print(f"loss {float(loss):.6f}, of the discriminators {float(discriminator_loss):.6f}, mean radius {radius:.3f}")
