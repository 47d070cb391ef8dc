"""A DLRM with its tables in two processes and its dense part in a third: run.py starts it by `whale-nebula run --all`,
and the lead prints the rows trained a second. Arguments: rows of a batch, steps, staleness, and whether the two
processes are workers of one cluster, with one table, or clusters with a table each.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models.recommender import SplitEmbedding, dlrm, generated_clicks, look_ahead

FIELDS, NUMBERS, WIDTH, VALUES, ROWS, WARM = 8, 4, 16, 20_000, 65_536, 60


class Pace(keras.callbacks.Callback):
    """Callback that takes the time from the end of the warm-up to that of the last step; afterwards TensorFlow may wait
    for seconds for the threads of a dataset.
    """

    began = ended = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the end of a step."""
        self.ended = time.perf_counter()
        if batch + 1 == WARM:
            self.began = self.ended


def main(batch: int, steps: int, staleness: int, together: int) -> None:
    """Train and print the rate."""
    nb.init(seed=1)
    log = generated_clicks(ROWS, fields=FIELDS, numbers=NUMBERS, vocabulary=VALUES)
    tables = 1 if together else 2
    embedding = SplitEmbedding(WIDTH, tables=tables, optimizer=keras.optimizers.Adagrad(0.1), staleness=staleness)
    model = dlrm(embedding, fields=FIELDS, numbers=NUMBERS, width=WIDTH)
    apart: dict[str, Any] = {"table0": "cpu0", "table1": "cpu1"}
    nb.place(model, {r"(?!table\d$).*": "gpu", **({"table0": "cpu", "(table0)": nb.split()} if together else apart)})
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    batches = tf.nest.map_structure(lambda each: each.reshape(-1, batch, *each.shape[1:]), (log.inputs, log.clicked))
    data = tf.data.Dataset.from_tensor_slices(batches).repeat()
    pace = Pace()
    model.fit(look_ahead(data, embedding), steps_per_epoch=WARM + steps, verbose=0, callbacks=[pace])
    if nb.here().lead:
        took = pace.ended - pace.began
        print(json.dumps({"rows a second": round(batch * steps / took)}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
