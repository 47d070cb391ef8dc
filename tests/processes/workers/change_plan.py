"""Worker: trains one model by a given plan, and resumes from the checkpoint of a run by another plan."""

import hashlib
import sys
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.worker_reports import enter_worker_folder, report_value

ROWS, BATCH = 48, 8
PLANS: dict[str, dict[str, Any]] = {
    "stages": {},
    "replicas": {"replica": {"count": 2}},
    "slots in parts": {"replica": {"count": 2, "shard": "optimizer"}},
    "split": {"split": {"count": 2}},
    "split rows": {"split": {"count": 2, "axis": 0}},
    "pipeline": {"pipeline": {"micro_batch": 4}, "replica": {"count": 2}},
    "the other way": {"order": ("c1", "c0")},
    "planned": {"auto": True},
}


def build_model(plan: dict[str, Any]) -> keras.Model:
    """Two stages, in scopes as the plan has them."""
    first, last = plan.get("order", ("c0", "c1"))
    if plan.get("auto"):
        nb.auto_parallel()
        first = last = None
    with nb.cluster() if first else nullcontext(), _open_scope(nb.pipeline, plan.get("pipeline")):
        inputs = keras.Input((6,), name="x")
        with _open_scope(nb.replica, plan.get("replica")), nb.stage(cluster=first) if first else nullcontext():
            hidden = keras.layers.Dense(32, activation="relu")(inputs)
            with _open_scope(nb.split, plan.get("split")):
                hidden = keras.layers.Dense(10, activation="tanh")(hidden)
        with nb.stage(cluster=last) if last else nullcontext():
            outputs = keras.layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


def _open_scope(scope: Any, options: dict[str, Any] | None) -> Any:
    return nullcontext() if options is None else scope(**options)


def train_model(name: str = "stages", epochs: str = "1", folder: str = "") -> None:
    """Report the initial weights, the history, and the final weights."""
    model = build_model(PLANS[name])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 6)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")
    if folder and nb.resumed() is not None:
        nb.restore(folder, model)
        report_value("began", digest_weights(model))
    history = model.fit(x, y, batch_size=BATCH, epochs=int(epochs), verbose=0)
    report_value("history", history.history)
    report_value("ended", digest_weights(model))


def digest_weights(model: keras.Model) -> str:
    """A digest of all weights."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())).hexdigest()


if __name__ == "__main__":
    name, epochs, folder, *apart = sys.argv[1:]
    folder = enter_worker_folder(folder) if apart else folder
    with nb.init({"checkpoint": {"folder": folder, "every": 4}}):
        train_model(name, epochs, folder)
