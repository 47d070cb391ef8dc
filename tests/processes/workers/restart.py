"""Worker: trains, saves after each step, dies where it is told to, and goes on from what was saved when started again.

`folder` is where it saves, `dies` says who is killed in which epoch after which step, "npu/0@0@3"; a step takes `rest`
seconds longer than it would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import keras

import whale_nebula as nb
from tests.processes.worker_reports import bits, tell
from tests.same import data
from whale_nebula.errors import NebulaError

STEPS = 6


def taught() -> keras.Model:
    """A stage in each of two clusters; what SGD remembers is in the weights alone."""
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


def train(folder: Path, dies: str = "", rest: float = 0.0, steps: int = STEPS) -> None:
    """Train from the last step that was saved, and tell of each."""
    here = nb.here()
    tell(f"epoch {here.epoch}", time.time())
    model = taught()
    saved = sorted(folder.glob("[0-9]*.weights.h5"))
    if saved:
        model.load_weights(saved[-1])
    x, y = data(8 * steps, 6), data(8 * steps, 3, seed=1)
    for step in range(len(saved), steps):
        rows = slice(8 * step, 8 * step + 8)
        tell("loss", float(model.train_on_batch(x[rows], y[rows])).hex())
        tell(f"epoch {here.epoch} step {step}", time.time())
        model.save_weights(folder / "part.weights.h5")  # when it returns, the file is there for all
        if here.lead:  # who is killed while it writes leaves no half of a file under the name of a whole one
            (folder / "part.weights.h5").rename(folder / f"{step}.weights.h5")
        if dies == f"{here.worker}@{here.epoch}@{step}":
            tell("dies", time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(rest)
    tell("weights", bits(model.get_weights()))


def main(folder: str, dies: str = "", rest: str = "0") -> None:
    nb.init()
    try:
        train(Path(folder), dies, float(rest))
    except NebulaError as failure:
        tell("error", str(failure))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
