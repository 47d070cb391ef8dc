"""One run: train the translator from scratch until its validation loss is low enough. Prints a line of JSON.

python benchmarks/convergence/one.py int8 1
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from boundaries import CODECS
from common import describe_machine
from language import LONGEST, PAD, Pairs, make_pairs
from translator import WIDTH, translator

import whale_nebula as nb

PAIRS, HELD_OUT, BATCH = 12_800, 256, 32
RATE, SMOOTHING, VALIDATION_INTERVAL = 2e-3, 0.95, 25
LOSS_LIMIT, STEPS, SECONDS = 0.1, 3000, 240.0
"""A run ends below this loss, after so many steps, or when it has used so many seconds of its core."""
RAW_BYTES = BATCH * LONGEST * WIDTH * 4
"""Bytes of the boundary's tensor, and of its gradient, where nothing makes them small."""


def make_inputs(given: Pairs, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The model's inputs."""
    return {"source": given.source, "shown": given.decoder_input, "marks": given.marks, "ids": ids.astype("int64")}


def weights(given: Pairs) -> np.ndarray:
    """Sample weights: 0 for padding."""
    return (given.target != PAD).astype("float32")


def build_model(codec: str) -> keras.Model:
    """The compiled translator."""
    made = translator(CODECS[codec])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    made.compile(keras.optimizers.Adam(RATE), loss)
    return made


def batches(data: Pairs, seed: int) -> Iterator[np.ndarray]:
    """The pairs of each step, in another order in each epoch."""
    draw = np.random.default_rng(seed)
    while True:
        order = draw.permutation(len(data.source))
        yield from order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)


def validation(made: keras.Model, held: Pairs) -> float:
    """The loss on held-out sentences, with the codec on."""
    ids = -1 - np.arange(len(held.source))
    found = float(made.test_on_batch(make_inputs(held, ids), held.target, sample_weight=weights(held)))
    made.reset_metrics()
    return found


def train(codec: str, seed: int, most: int = STEPS) -> dict[str, Any]:
    """Steps, losses, bytes each way, seconds."""
    keras.utils.set_random_seed(seed)
    data, held, made = make_pairs(PAIRS, 1), make_pairs(HELD_OUT, 999), build_model(codec)
    curve: list[list[float]] = []
    taken: list[float] = []
    there = back = 0
    smoothed = np.nan
    began, spent = time.perf_counter(), time.process_time()
    for step, which in enumerate(batches(data, seed), 1):
        start = time.process_time()  # of this thread, independent of other programs
        some = data.select(which)
        loss = float(made.train_on_batch(make_inputs(some, which), some.target, sample_weight=weights(some)))
        made.reset_metrics()
        taken.append(time.process_time() - start)
        smoothed = loss if step == 1 else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
        links = nb.last_report().links
        there, back = there + links["left->right"].bytes, back + links["right->left"].bytes
        if step % VALIDATION_INTERVAL == 0:
            curve.append([step, round(smoothed, 4), round(validation(made, held), 4), there, back])
            if max(curve[-1][1:3]) < LOSS_LIMIT or step >= most or time.process_time() - spent > SECONDS:
                break
    return {
        "codec": codec,
        "seed": seed,
        "steps": step,
        "raw_bytes": RAW_BYTES,
        "step_seconds": round(statistics.median(taken), 4),
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
    }


def main() -> int:
    """Run, and print the result."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    about = describe_machine()
    try:
        found = train(sys.argv[1], *map(int, sys.argv[2:]))
    except nb.errors.NotYetError as error:
        print(f"not built yet: {error}", file=sys.stderr)
        return 3
    print(json.dumps({**found, "machine": about}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
