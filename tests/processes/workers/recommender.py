"""Worker: a model with three tables: two in the first cluster, sharded over its workers, one with hot rows beside the
dense part; checkpoints.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

import whale_nebula as nb
from tests.processes.worker_reports import report_value
from whale_nebula.errors import NotYetError, RemoteFailureError
from whale_nebula.models.recommender import (
    HashedEmbedding,
    RowTable,
    SplitEmbedding,
    generated_clicks,
    look_ahead,
    most_frequent,
    wide_and_deep,
)


def train_model(epochs: int, folder: str = "", micro_batch: int = 1) -> None:
    """Train up to this number of epochs, report this process's rows, and try to save weights in `folder`."""
    log = generated_clicks(192, fields=3, numbers=2)
    deep = SplitEmbedding(4, optimizer=keras.optimizers.Adam(0.05), hot=most_frequent(log.ids, 9), staleness=1)
    wide = HashedEmbedding(1, optimizer=keras.optimizers.Ftrl(0.05), name="wide")
    model = wide_and_deep(deep, wide, fields=3, numbers=2, deep=(6,))
    nb.place(model, {"table0|wide": "c0", "(?!table0$|wide$).*": "c1", "(table0|wide)": nb.split(axis=0)})
    tables = {layer.name: layer.table for layer in (*deep.layers, wide)}
    nb.state(**tables)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    data = look_ahead(tf.data.Dataset.from_tensor_slices((log.inputs, log.clicked)).batch(48), deep, wide)
    with nb.pipeline(micro_batch, coupled="allow"):
        history = model.fit(data, epochs=epochs, verbose=0).history
    report_value("ahead", sum(layer.steps.looked_ahead for layer in (*deep.layers, wide)))
    report_value("loss", history["loss"])
    report_value("rows", {name: list_rows(table) for name, table in tables.items()})
    if epochs > 1 and folder:
        try:
            model.save_weights(f"{folder}/rows.weights.h5")
        except (NotYetError, RemoteFailureError) as error:  # there and elsewhere: the run is over
            report_value("refused", str(error))


def list_rows(table: RowTable) -> dict[str, list[Any]]:
    """By id, the count, and the exact weights and slots."""
    state = table.state_dict()
    found = zip(state["ids"].tolist(), state["counts"].tolist(), state["values"], strict=True)
    return {str(key): [count, values.tobytes().hex()] for key, count, values in found}


def main(folder: str, epochs: str, micro_batch: str = "1") -> None:
    nb.init(checkpoint=folder)
    train_model(int(epochs), folder, int(micro_batch))


if __name__ == "__main__":
    main(*sys.argv[1:])
