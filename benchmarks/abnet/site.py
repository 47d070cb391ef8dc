"""One site of the timing: some steps of a row over a real line; run.py starts it by `whale-nebula run`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import experiment
import keras
import tensorflow as tf
from one import options
from rows import ROWS

import whale_nebula as nb
from whale_nebula.models import text

MICRO_BATCHES, BATCH, SKIPPED = 4, 80, 3


class Timer(keras.callbacks.Callback):
    """Callback that keeps the report of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.predicted: list[float] = []
        self.computes: list[float] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Record the end of a step."""
        report = nb.last_report()
        self.seconds.append(report.step_seconds)
        self.predicted.append(report.predicted_seconds or 0.0)
        self.computes.append(sum(stage.compute_seconds or 0.0 for stage in report.stages.values()))


def select_most_common(batches: Iterable[Any]) -> list[Any]:
    """The batches with the most common length of sentences, whose steps send the same bytes and can be predicted."""
    every = list(batches)
    sizes = [tuple(tuple(tensor.shape) for tensor in tf.nest.flatten(batch)) for batch in every]
    usual, _ = Counter(sizes).most_common(1)[0]
    return [batch for batch, size in zip(every, sizes, strict=True) if size == usual]


def main() -> None:
    """Train some steps, and print their times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--timed", type=int, default=12)
    asked = options(parser).parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    setting = experiment.setting(ROWS[asked.row], asked.steps)
    folder = experiment.folder_of(asked.kept, setting.pretrained)
    corpus, words = experiment.read(asked.text, tuple(asked.languages), asked.test), experiment.tokenizers(folder)
    rows = experiment.encoded(corpus.train.first(setting.pairs), words)
    model = experiment.translator(ROWS[asked.row], folder, setting, micro_batches=MICRO_BATCHES)
    order = text.make_order(len(rows), batch=BATCH, seed=1, lengths=rows.lengths)
    timer = Timer()
    data = select_most_common(experiment.batches(ROWS[asked.row], rows, order, words, 1))
    steps = {"epochs": 1, "steps_per_epoch": asked.timed, "shuffle": False, "verbose": 0}
    model.fit((batch for batch in itertools.cycle(data)), **steps, callbacks=[timer])
    report = nb.last_report()
    told = {
        "site": nb.here().cluster,
        "step": statistics.median(timer.seconds[SKIPPED:]),
        "seconds": timer.seconds,
        "predicted": statistics.median(timer.predicted[SKIPPED:]),
        "computes": statistics.median(timer.computes[SKIPPED:]),
        "links": {name: link.bytes for name, link in report.links.items()},
        "raw": {name: link.raw_bytes for name, link in report.links.items()},
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
