"""A worker that keeps its inputs at home, and looks at every frame that it hands to gRPC for their checksums.

Both workers of cluster `a` read x, `b` and `c` read z, and `c` alone reads y. They train on arrays, and on datasets of
which `a` reads the rows of its micro-batches. At the end the first worker fails by an error whose text is a row.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.looking import Checksums, Frame, watched
from tests.processes.telling import tell
from whale_nebula.errors import NebulaError
from whale_nebula.runtime.run import current_run

ROWS, BATCH = 8, 4
DEADLINE = 30.0
ROW = "paciente 4711: positivo"
NAME = "host-of-the-hospital"
HERE = (NAME, str(Path(__file__).parent), os.getcwd(), ROW)


def model() -> keras.Model:
    """Three stages, the first of them by two replicas."""
    x, z = keras.Input((3,), dtype="int32", name="x"), keras.Input((2,), name="z")
    with nb.cluster(), nb.pipeline(micro_batch=2):
        with nb.replica(2), nb.stage(cluster="a"):
            hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(x))
        with nb.stage(cluster="b"):
            hidden = keras.layers.Dense(3)(keras.layers.Concatenate()([hidden, z]))
        with nb.stage(cluster="c"):
            out = keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, z]))
    made = keras.Model({"x": x, "z": z}, out, name="kept")
    made.compile("sgd", "mse")
    return made


def dataset(arrays: dict[str, Any]) -> Any:
    """The rows of this cluster, of which each process reads its own."""
    rows = {name: array for name, array in arrays.items() if array is not None}

    def row(number: Any) -> Any:
        found = {name: tf.gather(array, number) for name, array in rows.items()}
        return {"x": found.get("x"), "z": found.get("z")}, found.get("y")

    return nb.shard(tf.data.Dataset.range(ROWS).map(row).batch(BATCH))


def looked(part: str) -> None:
    """Tell of which inputs a checksum went to which worker since the last look, and what of this host."""
    count = len(taken)  # more may come meanwhile
    frames = [frame for frame in taken[:count] if frame]
    del taken[:count]
    sent = {(name, Frame.read(frame).reader) for frame in frames for name in checksums.finds(frame)}
    named = sorted({each for each in HERE if any(each.encode() in frame for frame in frames)})
    tell(f"{here.worker} {part}", {"sums": sorted(sent), "named": named, "frames": len(frames)})


def met() -> None:
    """Wait for all others twice: each comes the second time once it has all that was sent before."""
    for number in range(2):
        current_run().ledger.session.meet(f"look {number}")


socket.gethostname = lambda: NAME
taken = watched()
nb.init()
here = nb.here()
draw = np.random.default_rng(0)
arrays: dict[str, Any] = {
    "x": draw.integers(0, 50, (ROWS, 3)).astype("int32"),
    "z": draw.normal(size=(ROWS, 2)).astype("float32"),
    "y": draw.normal(size=(ROWS, 1)).astype("float32"),
}
checksums = Checksums.of(arrays)
read = {"a": "x", "b": "z", "c": "zy"}[here.cluster]
own = {name: array if name in read else None for name, array in arrays.items()}
kept = model()
kept.fit({"x": own["x"], "z": own["z"]}, own["y"], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
met()
looked("arrays")
kept.fit(dataset(own), epochs=1, verbose=0)
met()
looked("dataset")
session = current_run().ledger.session
if here.worker == "a/0":
    try:
        raise ValueError(f"cannot tokenize {ROW!r}")
    except ValueError as failure:
        session.fail(failure)
    limit = time.monotonic() + DEADLINE
    while time.monotonic() < limit and sum(b'"FAIL"' in frame for frame in taken) < len(session.links):
        time.sleep(0.01)  # they leave by threads of their own
try:
    session.meet("the end")
except NebulaError as failed:
    tell(f"{here.worker} heard", str(failed))
looked("failure")
