"""One site of the pipeline in whale_nebula; run.py starts it by `whale-nebula run`. Prints the seconds of each step,
the closed form of its schedule, and a digest of its final weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models.transformer import Sizes, transformer


def parse_options() -> argparse.Namespace:
    """The common options of both sides."""
    parser = argparse.ArgumentParser()
    for name in ("rows", "length", "vocabulary", "width", "heads", "blocks", "micro_batches", "steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--codec", default="none", help="how boundaries cross, as nb.compress takes it")
    parser.add_argument("--backward", default="default", help="how their gradients do")
    parser.add_argument("--links", help="emulate this line in one process, instead of being one of several")
    return parser.parse_args()


def open_compression(a: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """The scope of compression, if there is one."""
    return contextlib.nullcontext() if a.codec == "none" else nb.compress(a.codec, backward=a.backward)


def make_model(a: argparse.Namespace) -> keras.Model:
    """Embedding and half of the blocks in one cluster, the rest and the output in the other."""
    sizes = Sizes(a.vocabulary, a.length, a.width, a.heads, a.blocks)
    stages = {block: nb.stage(cluster="gpu" if block < a.blocks // 2 else "npu") for block in range(a.blocks)}
    with nb.cluster(), nb.pipeline(micro_batch=a.micro_batches), open_compression(a):
        made = transformer(sizes, around=stages.__getitem__)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.01), loss=loss)
    return made


class StepRecorder(keras.callbacks.Callback):
    """Callback that keeps the report of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.predicted: list[float] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Record the end of a step."""
        report = nb.last_report()
        self.seconds.append(report.step_seconds)
        self.predicted.append(report.predicted_seconds or 0.0)


def hash_weights(weights: list[np.ndarray]) -> str:
    """A hash of all weights."""
    whole = hashlib.sha256()
    for each in weights:
        whole.update(np.ascontiguousarray(each).tobytes())
    return whole.hexdigest()


def main() -> None:
    """Train, and print the results."""
    a = parse_options()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    if a.links:
        nb.init(links=a.links)
    draw = np.random.default_rng(2)
    shape = (a.rows * a.steps, a.length)
    tokens, targets = (draw.integers(0, a.vocabulary, shape, dtype="int32") for _ in range(2))
    made, timer = make_model(a), StepRecorder()
    made.fit(tokens, targets, batch_size=a.rows, epochs=1, shuffle=False, verbose=0, callbacks=[timer])
    told = {
        "site": nb.here().cluster,
        "median": statistics.median(timer.seconds[2:]),
        "seconds": timer.seconds,
        "predicted": timer.predicted[-1],
        "weights": hash_weights(made.get_weights()),
        "links": {name: link.bytes for name, link in nb.last_report().links.items()},
        "codecs": {name: each.codec for name, each in nb.last_report().boundaries.items()},
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
