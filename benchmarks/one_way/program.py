"""One site of a generator that feeds a discriminator; run.py starts it by `whale-nebula run`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models.transformer import Sizes, transformer

LENGTH, VOCABULARY, MASK, READ_EVERY = 64, 2000, 1, 10
LINES = {"free": ("100gbit", "0ms"), "slow": ("120mbit", "20ms")}


def make_networks(width: int) -> tuple[keras.Model, keras.Model]:
    """A generator that predicts tokens, and a discriminator that detects replaced ones."""
    sizes = Sizes(VOCABULARY, LENGTH, width, 8, 4)
    generator = transformer(sizes)
    body = transformer(sizes)
    hidden = body.get_layer("norm").output
    discriminator = keras.Model(body.input, keras.layers.Dense(1, name="replaced")(hidden)[..., 0])
    return generator, discriminator


def main() -> None:
    """Train over either line alternately, and print the seconds of a step over each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--line", type=Path, required=True, help="the file that the line follows")
    parser.add_argument("--pairs", type=int, default=12, help="of ten steps over either line")
    parser.add_argument("--rows", type=int, default=36)
    parser.add_argument("--width", type=int, default=256)
    a = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    generator, discriminator = make_networks(a.width)
    of_generator, of_discriminator = keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4)
    of_generator.build(generator.trainable_variables)
    of_discriminator.build(discriminator.trainable_variables)

    @nb.function
    def step(tokens: tf.Tensor, hidden: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as first, tf.GradientTape() as second, nb.cluster():
            with nb.stage(cluster="gpu"):
                logits = generator(tf.where(hidden, MASK, tokens), training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens, logits)
                filled = tf.reduce_mean(losses)
                ids = tf.where(hidden, tf.argmax(logits, -1, tf.int32), tokens)
            with nb.stage(cluster="npu"):
                replaced = tf.cast(ids != tokens, tf.float32)
                found = discriminator(ids, training=True)
                told = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(replaced, found))
        gradients = first.gradient(filled, generator.trainable_variables)
        of_generator.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
        gradients = second.gradient(told, discriminator.trainable_variables)
        of_discriminator.apply_gradients(zip(gradients, discriminator.trainable_variables, strict=True))
        return {"generator": filled, "discriminator": told}

    draw = np.random.default_rng(2)
    tokens = draw.integers(2, VOCABULARY, (a.rows, LENGTH), dtype="int32")
    seconds: dict[str, list[float]] = {line: [] for line in LINES}
    turns = [list(LINES)[:: 1 if number % 2 else -1] for number in range(a.pairs)]
    losses: dict[str, float] = {}
    for line in ["free", *(line for turn in turns for line in turn)]:
        write_line(a.line, line)
        began = time.perf_counter()
        for _ in range(READ_EVERY):
            found = step(tokens, draw.random((a.rows, LENGTH)) < 0.15)
        losses = {name: float(loss) for name, loss in found.items()}
        seconds[line].append((time.perf_counter() - began) / READ_EVERY)
    del seconds["free"][0]  # the first steps are traced and planned
    links = {name: link.bytes for name, link in nb.last_report().links.items()}
    print(json.dumps({"site": nb.here().cluster, "seconds": seconds, "losses": losses, "links": links}), flush=True)


def write_line(path: Path, line: str) -> None:
    """Switch the line between two steps: the generator's site requests it, and waits until it is done."""
    if nb.here().cluster == "gpu":
        path.write_text(" ".join(LINES[line]))
        time.sleep(0.2)


if __name__ == "__main__":
    main()
