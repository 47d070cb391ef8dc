"""Worker: trains a model without a scope under `nb.auto_parallel`, in clusters too small for all of it."""

import sys

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.telling import tell

KIB = 1 << 10


def lesson(memory: str = "1280KiB") -> None:
    """Tells what was planned, and what came of it."""
    nb.auto_parallel(memory=memory)
    model = keras.Sequential(
        [keras.Input((64,)), *(keras.layers.Dense(192, activation="relu") for _ in range(4)), keras.layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    draw = np.random.default_rng(0)
    x, y = draw.random((96, 64)).astype("float32"), draw.random((96, 4)).astype("float32")
    plan = nb.plan(model, x[:32], y[:32])
    history = model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False).history
    tell("stages", {name: stage.cluster for name, stage in plan.stages.items()})
    tell("memory", max(plan.predicted.memory.values()))
    tell("history", history)
    tell("evaluated", model.evaluate(x, y, batch_size=32, verbose=0))
    tell("predicted", float(model.predict(x, batch_size=32, verbose=0).sum()))
    tell("verified", nb.verify(model, x[:32], y[:32]).ok)
    with nb.gathered():
        tell("weights", [float(np.abs(each).sum()) for each in model.get_weights()])


if __name__ == "__main__":
    with nb.init({"inputs": {}}):
        lesson(*sys.argv[1:])
