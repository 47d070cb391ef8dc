"""A small model in two clusters and its use, in one process or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data
from tests.processes.worker_reports import digest_tensors

X, Y = data(40, 6), data(40, 3, seed=1)


def build_model(width: int = 8, adam: bool = False) -> keras.Model:
    """Layer `first` in cluster c0, `second` in c1. The launcher sets the seed.

    SGD is traced faster than Adam.
    """
    inputs = keras.Input((6,), name="features")
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="c0"):
            hidden = keras.layers.Dense(width, activation="relu", name="first")(inputs)
        with nb.stage(cluster="c1"):
            outputs = keras.layers.Dense(3, name="second")(hidden)
    model = keras.Model(inputs, outputs, name="taught")
    optimizer = keras.optimizers.Adam(0.01) if adam else keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model: keras.Model, x: Any = X, y: Any = Y, **options: Any) -> dict[str, list[str]]:
    """Train without shuffling; returns the exact history."""
    chosen = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0, **options}
    return to_hex(model.fit(x, y, **chosen).history)


def to_hex(logs: dict[str, Any]) -> dict[str, list[str]]:
    return {name: [float(v).hex() for v in np.ravel(value)] for name, value in logs.items()}


@nb.function
def summarize_rows(rows: Any) -> Any:
    """A function without variables: a scalar from each cluster, and rows from each."""
    with nb.cluster(), nb.pipeline(3):
        with nb.stage(cluster="c0"):
            doubled = rows * 2.0
            low = tf.reduce_mean(doubled)
        with nb.stage(cluster="c1"):
            high = tf.reduce_sum(doubled, axis=1)
            return {"low": low, "doubled": doubled, "high": high, "mean": tf.reduce_mean(doubled**2)}


def train_in_turn() -> dict[str, Any]:
    """Train two layers by programs that place them in other clusters, and evaluate them in between and at the end."""
    first, second = keras.layers.Dense(8, activation="relu", name="first"), keras.layers.Dense(3, name="second")
    optimizer = keras.optimizers.Adam(0.01)

    def make_step(own: str, other: str, *, trains: bool) -> Any:
        def step(rows: Any, wanted: Any) -> Any:
            with tf.GradientTape() as tape:
                with nb.stage(cluster=own):
                    hidden = first(rows)
                with nb.stage(cluster=other):
                    loss = tf.reduce_mean((second(hidden) - wanted) ** 2)
            if trains:
                variables = [*first.trainable_variables, *second.trainable_variables]
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return nb.function(step)

    whole, cut = make_step("c1", "c1", trains=True), make_step("c0", "c1", trains=True)
    reverse, score = make_step("c1", "c0", trains=True), make_step("c0", "c0", trains=False)
    losses = [step(X, Y) for step in (whole, cut, score, cut, reverse, whole, cut, score)]
    with nb.gathered():
        weights = [*first.variables, *second.variables, *optimizer.variables]
        return {"losses": [float(loss).hex() for loss in losses], "weights": digest_tensors(weights)}


def exercise_model(folder: Path) -> tuple[keras.Model, dict[str, Any]]:
    """Build, train, evaluate, predict, read and save."""
    model = build_model(adam=True)
    found: dict[str, Any] = {"initial": digest_tensors(model.get_weights())}
    found["history"] = fit(model, validation_data=(X[:20], Y[:20]))
    found["evaluate"] = to_hex(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True))
    found["predict"] = digest_tensors([model.predict(X, batch_size=12, verbose=0)])
    found["weights"] = digest_tensors(model.get_weights())
    with nb.gathered():
        found["optimizer"] = digest_tensors(model.optimizer.variables)
        found["nested"] = digest_tensors(model.get_weights())
        found["after the nested"] = digest_tensors(model.variables)
    weights = folder / "model.weights.h5"
    found["saved"] = [_save_and_stat(model.save, folder / "model.keras"), _save_and_stat(model.save_weights, weights)]
    found["summary"] = [model.count_params(), _read_summary(model)]
    found["function"] = {name: digest_tensors([value]) for name, value in summarize_rows(X[:7]).items()}
    fit(model, epochs=1)
    model.load_weights(weights)
    found["loaded"] = digest_tensors(model.get_weights())
    model.set_weights([2.0 * weight for weight in model.get_weights()])
    found["set"] = digest_tensors(0.5 * weight for weight in model.get_weights())
    return model, found


def _save_and_stat(save: Any, path: Path) -> tuple[str, int, int]:
    """Save, and return the name, inode and modification time of the file."""
    save(path)
    state = path.stat()
    return path.name, state.st_ino, state.st_mtime_ns


def _read_summary(model: keras.Model) -> str:
    lines: list[str] = []
    model.summary(print_fn=lambda line, *rest, **options: lines.append(line))
    return "\n".join(lines)
