"""Worker: trains, saves after each step, is killed at a given step, and resumes from its files when it is restarted.

It saves to `folder`. `kill_at` is the worker, epoch and step of a kill ("npu/0@0@3"); each step is followed by a pause
of `pause` seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import keras
import psutil

import whale_nebula as nb
from tests.parity_harness import data
from tests.processes.worker_reports import digest_tensors, report_value
from whale_nebula.errors import NebulaError

STEPS = 6


def build_model() -> keras.Model:
    """A stage in each of two clusters; SGD without momentum has no state but the weights."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(8, activation="relu")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(3)(hidden)
    model = keras.Model(inputs, outputs, name="taught")
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def train(folder: Path, kill_at: str = "", pause: float = 0.0, steps: int = STEPS) -> None:
    """Train from the last saved step, and report each."""
    here = nb.here()
    report_value(f"epoch {here.epoch}", time.time())
    report_value(f"start of {here.worker} in epoch {here.epoch}", psutil.Process().create_time())
    model = build_model()
    saved = sorted(folder.glob("[0-9]*.weights.h5"))
    if saved:
        model.load_weights(saved[-1])
    x, y = data(8 * steps, 6), data(8 * steps, 3, seed=1)
    for step in range(len(saved), steps):
        rows = slice(8 * step, 8 * step + 8)
        report_value("loss", float(model.train_on_batch(x[rows], y[rows])).hex())
        report_value(f"epoch {here.epoch} step {step}", time.time())
        model.save_weights(folder / "part.weights.h5")  # when it returns, all processes see the file
        if here.lead:  # a kill during a write leaves no incomplete file with this name
            (folder / "part.weights.h5").rename(folder / f"{step}.weights.h5")
        if kill_at == f"{here.worker}@{here.epoch}@{step}":
            report_value("dies", time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
    report_value("weights", digest_tensors(model.get_weights()))


def main(folder: str, kill_at: str = "", pause: str = "0") -> None:
    nb.init()
    try:
        train(Path(folder), kill_at, float(pause))
    except NebulaError as failure:
        report_value("error", str(failure))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
