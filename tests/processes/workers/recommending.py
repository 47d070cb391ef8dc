"""Worker: a DLRM whose table of rows is in the first cluster, trained with checkpoints."""

from __future__ import annotations

import sys

import keras

import whale_nebula as nb
from tests.processes.telling import bits, tell
from whale_nebula.errors import NotYetError, RemoteFailureError
from whale_nebula.models.recommender import HashedEmbedding, dlrm, generated_clicks


def lesson(epochs: int, folder: str = "") -> None:
    """Train so many epochs in all, tell of the rows that this process has, and try to save them in `folder`."""
    log = generated_clicks(192, fields=3, numbers=2)
    layer = HashedEmbedding(4, optimizer=keras.optimizers.Adam(0.05), name="table")
    model = dlrm(layer, fields=3, numbers=2, width=4, bottom=(), top=(6,))
    nb.place(model, {"table": "c0", "(?!table$).*": "c1"})
    nb.state(rows=layer.table)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(log.inputs, log.clicked, batch_size=48, epochs=epochs, verbose=0, shuffle=False).history
    state = layer.table.state_dict()
    tell("loss", history["loss"])
    tell("predicted", bits([model.predict(log.inputs, verbose=0)]))
    tell("rows", len(layer.table))
    tell("bits", bits([state["ids"], state["counts"], state["values"]]))
    if epochs > 1 and folder:
        try:
            model.save_weights(f"{folder}/rows.weights.h5")
        except (NotYetError, RemoteFailureError) as error:  # there and elsewhere: the run is over
            tell("refused", str(error))


def main(folder: str, epochs: str) -> None:
    nb.init(checkpoint=folder)
    lesson(int(epochs), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
