"""One site of pretraining whose line alternates; run.py starts one for each cluster by `whale-nebula run`."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models import Bert, BertSizes, masked_lm
from whale_nebula.models.pretraining import DISCRIMINATOR, Corruption, Discriminator, Pretraining, make_adam

FREE = "100gbit 0ms"
READ_EVERY = 10


def networks(names: list[str], words: int, length: int, width: int) -> Pretraining:
    """Generators of half the width, which together have the discriminator's number of rows."""
    keras.utils.set_random_seed(1)
    common = {"vocabulary": words, "length": length, "dropout": 0.0, "norm": "pre"}
    small = BertSizes(width=width // 2, heads=4, layers=2, inner=width, **common)
    large = BertSizes(width=width, heads=8, layers=2, inner=2 * width, **common)
    generators = {name: masked_lm(Bert(small, name=name)) for name in names}
    found = {**generators, DISCRIMINATOR: Discriminator(Bert(large, name="kept"))}
    adams = {name: make_adam(each, 1e-4, steps=10_000) for name, each in found.items()}
    how = Corruption(mask=4, end=3, special=(0, 2, 3))
    return Pretraining(generators, found[DISCRIMINATOR], how, optimizers=adams)


def main() -> None:
    """Train over a free and a slow line alternately, and print the seconds of a step over each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--line", type=Path, required=True, help="the file that the line follows")
    parser.add_argument("--slow", required=True, help="the slow line: '60mbit 20ms'")
    parser.add_argument("--generators", nargs="+", required=True)
    parser.add_argument("--pairs", type=int, default=4, help="of windows of steps, one over either line")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--words", type=int, default=2048)
    parser.add_argument("--width", type=int, default=192)
    a = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    form = {"shape": [None, a.length], "dtype": "int32"}
    nb.init({"inputs": {f"texts/{name}": form for name in a.generators}})
    model = networks(a.generators, a.words, a.length, a.width)

    @nb.function
    def step(numbers: dict[str, tf.Tensor], texts: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape, nb.cluster(), nb.compress(fp16=True):
            losses = model.losses(texts, numbers, around=lambda name: nb.stage(cluster=name))
        model.update(tape, losses)
        return losses

    each = a.rows // len(a.generators)
    draw = np.random.default_rng(2)
    rows = {name: draw.integers(5, a.words, (each, a.length), dtype="int32") for name in a.generators}
    texts = {name: own if nb.here().runs(name) else None for name, own in rows.items()}
    seconds: dict[str, list[float]] = {"free": [], "slow": []}
    turns = [list(seconds)[:: 1 if number % 2 else -1] for number in range(a.pairs)]
    count, losses = 0, {}
    for line in ["free", *(line for turn in turns for line in turn)]:
        change(a.line, FREE if line == "free" else a.slow, a.generators[0])
        began = time.perf_counter()
        for _ in range(READ_EVERY):
            numbers = {name: np.arange(each, dtype=np.int32) + count + at * each for at, name in enumerate(rows)}
            count += each * len(rows)
            found = step(numbers, texts)
        losses = {name: float(loss) for name, loss in found.items()}
        seconds[line].append((time.perf_counter() - began) / READ_EVERY)
    del seconds["free"][0]  # the first steps are traced and planned
    report = nb.last_report()
    busy = {name: stage.compute_seconds for name, stage in report.stages.items()}
    links = {name: [link.payload_bytes, link.bytes] for name, link in report.links.items()}
    word, hidden = math.log2(a.words), model.corruption.count(a.length)
    due = each * (a.length * (word + 1) + hidden * word) / 8
    told = {"seconds": seconds, "busy": busy, "losses": losses, "links": links, "due": due, "tokens": each * a.length}
    print(json.dumps({"site": nb.here().cluster, **told}), flush=True)


def change(path: Path, line: str, who: str) -> None:
    """Switch the line between two steps: the first generator's site requests it, and waits until it is done."""
    if nb.here().cluster == who:
        path.write_text(line)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
