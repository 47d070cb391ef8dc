"""A worker that keeps its parts at home: what it holds, what it saves, and what it reads back. Argument: a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.telling import bits, tell
from whale_nebula.errors import CollectiveReadError
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.variables.remote import Ledger

WIDTH = 1600  # 2 kernels of 10 MB, and two slots of Adam for each


def stored(variable: Any) -> int:
    """Bytes that the handle of a variable holds, past every guard; none if it was never given a value."""
    variable = getattr(variable, "value", variable)
    if not tf.raw_ops.VarIsInitializedOp(resource=variable.handle):
        return 0
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return int(np.prod(value.shape)) * value.dtype.size


def refused(read: Any) -> str:
    try:
        return f"read: {read()}"
    except CollectiveReadError as refusal:
        return str(refusal)


def everything() -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def own(variables: list[Any]) -> list[Any]:
    mine = "first" if nb.here().runs("c0") else "second"
    return [variable for variable in variables if mine in variable.path]


nb.init({"weights": "own"})
inputs = keras.Input((WIDTH,))
with nb.cluster(), nb.stage(cluster="c0"):
    hidden = keras.layers.Dense(WIDTH, name="first", kernel_initializer="ones")(inputs)
with nb.cluster(), nb.stage(cluster="c1"):
    outputs = keras.layers.Dense(WIDTH, name="second", kernel_initializer="ones")(hidden)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(0.01), "mse")

settle = Ledger.settle


def settling(ledger: Ledger, *rest: Any) -> None:
    """Just before what is elsewhere is emptied: optimizer slots of it must not be there yet."""
    if "slots" not in found:
        found["slots"] = sum(map(stored, model.optimizer.variables))
    settle(ledger, *rest)


found: dict[str, int] = {}
Ledger.settle = settling  # type: ignore[method-assign]
x, y = np.full((4, WIDTH), 1e-3, "float32"), np.zeros((4, WIDTH), "float32")
model.fit(x, y, batch_size=4, verbose=0)
tell("whole", sum(int(np.prod(v.shape)) * v.value.dtype.size for v in everything()))
tell("own", sum(int(np.prod(v.shape)) * v.value.dtype.size for v in own(everything())))
tell("own slots", sum(int(np.prod(v.shape)) * v.value.dtype.size for v in own(model.optimizer.variables)))
tell("held", sum(map(stored, everything())))
tell("slots before emptying", found["slots"])

tell("refusals", [refused(model.get_weights), refused(nb.gathered().__enter__), refused(lambda: model.save("m.keras"))])
path = Path(sys.argv[1]) / "model.weights.h5"
before = {name: link.totals().raw_bytes for name, link in current_run().ledger.session.links.items()}
model.save_weights(path)
after = {name: link.totals().raw_bytes for name, link in current_run().ledger.session.links.items()}
tell("crossed", [after[name] - before[name] for name in before])
saved = bits(own(everything()))
model.fit(x, y, batch_size=4, verbose=0)
tell("trained on", bits(own(everything())) != saved)
model.load_weights(path)
tell("loaded", bits(own(everything())) == saved)
tell("bits", saved)
model.fit(x, y, batch_size=4, verbose=0)
nb.shutdown()
