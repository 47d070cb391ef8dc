"""Worker: the lesson, and what this process holds of the model after it. Its argument is a folder for files."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.lesson import lesson
from tests.processes.telling import tell
from whale_nebula.errors import CollectiveReadError


def value(variable: Any) -> Any:
    return getattr(variable, "value", variable)


def raw_shape(variable: Any) -> list[int]:
    """What the handle holds, past every guard."""
    return list(tf.raw_ops.ReadVariableOp(resource=value(variable).handle, dtype=value(variable).dtype).shape)


def refusals(variable: Any) -> list[str]:
    """What each way of reading says."""
    found = []
    reads = (np.array, tf.convert_to_tensor, lambda v: v.numpy(), lambda v: v + 1.0, lambda v: v[0], tf.reduce_sum)
    for read in reads:
        try:
            found.append(f"read: {read(variable)}")
        except CollectiveReadError as refusal:
            found.append(str(refusal))
    return found


tell("here", {**dataclasses.asdict(nb.here()), "runs": {name: nb.here().runs(name) for name in ("c0", "c1")}})
model, found = lesson(Path(sys.argv[1]))
for name, what in found.items():
    tell(name, what)
tell("held", {variable.path: raw_shape(variable) for variable in [*model.variables, *model.optimizer.variables]})
foreign = model.get_layer("second" if nb.here().runs("c0") else "first").bias
tell("refusals", refusals(foreign) + refusals(value(foreign)))
