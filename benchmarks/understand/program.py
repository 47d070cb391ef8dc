"""One site of a BERT of the base model's width, cut in two; line.py starts it by `whale-nebula run`."""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models import Bert, BertSizes
from whale_nebula.models.understanding import Task, loss_of, understanding
from whale_nebula.strategies import low_rank_cut

CLUSTERS = ["gpu", "npu"]
ROWS, LENGTH, RANK = 32, 28, 8
SIZES = BertSizes(vocabulary=160, length=LENGTH, width=768, heads=12, layers=2, inner=3072, dropout=0.0)
CONTENDERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "svd": {"rank": RANK, "basis": "svd", "backward": None},
    "svd int4": {"rank": RANK, "basis": "svd", "int4": True, "backward": "int4"},
}


def train_contender(options: dict[str, Any], ids: np.ndarray, labels: np.ndarray, steps: int) -> dict[str, Any]:
    """Train some steps, cut after the first of two layers; returns the seconds of a step, and its bytes."""
    keras.utils.set_random_seed(1)
    bert, task = Bert(SIZES), Task("two")
    model = understanding(bert, task)
    places = low_rank_cut(bert, 0, CLUSTERS, after="head(/.*)?")
    if options:
        with nb.compress(**options):
            nb.place(model, places)
    else:
        nb.place(model, places)
    model.compile(keras.optimizers.Adam(1e-5), loss_of(task))
    seconds = []
    for _ in range(steps + 1):
        loss = model.train_on_batch(ids, labels)
        seconds.append(nb.last_report("train_step").step_seconds)
    report = nb.last_report("train_step")
    links = {**report.elsewhere.links, **report.links}
    sent = {name: links[name].payload_bytes for name in ("gpu->npu", "npu->gpu")}
    return {"seconds": median(seconds[1:]), "all": seconds[1:], "payload": sent, "loss": float(loss)}


def main() -> None:
    """Train each contender, and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    steps = parser.parse_args().steps
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    nb.init()
    draw = np.random.default_rng(1)
    ids, labels = draw.integers(5, 160, (ROWS, LENGTH), dtype="int32"), draw.integers(0, 2, ROWS)
    found = {name: train_contender(options, ids, labels, steps) for name, options in CONTENDERS.items()}
    print(json.dumps({"site": nb.here().cluster, "found": found}), flush=True)


if __name__ == "__main__":
    main()
