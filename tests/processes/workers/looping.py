"""Worker: a custom loop over models that nothing `fit`s, and what they say and save after it. Argument: a folder."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.telling import bits, tell
from whale_nebula.errors import CollectiveReadError

FOLDER = Path(sys.argv[1])
ROWS = np.ones((4, 4), "float32")
drawn = random.getstate()
nb.init()
tell("joining draws", random.getstate() != drawn)
first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)], name="first")
second = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name="second")
whole = keras.Sequential([first, second])
beside = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.05)


@nb.function
def step(rows: Any) -> Any:
    with tf.GradientTape() as tape:
        with nb.stage(cluster="c0"):
            hidden = first(rows)
        with nb.stage(cluster="c1"):
            loss = tf.reduce_mean(second(hidden) ** 2)
    variables = whole.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


def saved(model: Any, name: str) -> bool:
    """Save, and look at once whether the file holds the model."""
    model.save(FOLDER / f"{name}.keras")
    model.save_weights(FOLDER / f"{name}.weights.h5")
    loaded = keras.models.load_model(FOLDER / f"{name}.keras")
    again = keras.models.clone_model(loaded)
    again.load_weights(FOLDER / f"{name}.weights.h5")
    return bits(loaded.get_weights()) == bits(again.get_weights()) == bits(model.get_weights())


def refused(read: Callable[[], object]) -> str:
    try:
        return f"read: {read()}"
    except CollectiveReadError as refusal:
        return str(refusal)


before = float(step(ROWS))
tell("weights", {model.name: bits(model.get_weights()) for model in (first, second)})
tell("whole", bits(whole.get_weights()))
tell("saved", [saved(first, "first"), saved(second, "second"), saved(whole, "whole")])
tell("one that no step uses", len(beside.get_weights()) if nb.here().lead else 2)
checkpoint = tf.train.Checkpoint(first=first, second=second, optimizer=optimizer)
tell("checkpoint", refused(lambda: checkpoint.save(FOLDER / "alone")))
with nb.gathered():
    if nb.here().lead:  # what is here already is asked of nobody
        tell("here", len(whole.get_weights()))
        checkpoint.write(FOLDER / "together")
losses = [float(step(ROWS)) for _ in range(2)]
checkpoint.read(str(FOLDER / "together")).assert_consumed()
tell("restored", [losses, float(step(ROWS)) == losses[0] < before])
nb.shutdown()
