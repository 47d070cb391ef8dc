"""A worker that takes so many steps, says where it is, and at the end what it has come to.

After each step it can rest: so that a run lasts as long as a test needs, and yet has few steps.
"""

import sys
import time
from typing import Any

import keras

import whale_nebula as nb
from tests.processes.telling import bits, tell
from tests.same import data
from whale_nebula.errors import NebulaError
from whale_nebula.runtime.run import current_run


class Told(keras.callbacks.Callback):
    def __init__(self, rest: float) -> None:
        super().__init__()
        self.rest = rest

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % 10 == 5:
            tell(f"step {batch}", True)
        time.sleep(self.rest)


def connections() -> dict[str, int]:
    """How many there were to each other worker; none where clusters share a process."""
    ledger = current_run().ledger
    return {peer: link.state().connections for peer, link in ledger.session.links.items()} if ledger else {}


def main(steps: int, rest: float = 0.0) -> None:
    inputs = keras.Input((64,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(64, activation="relu")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(16)(keras.layers.Dropout(0.1)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    rows = 8 * steps
    try:
        history = model.fit(
            data(rows, 64), data(rows, 16, seed=1), batch_size=8, shuffle=False, verbose=0, callbacks=[Told(rest)]
        )
        tell("loss", [float(loss).hex() for loss in history.history["loss"]])
        tell("weights", bits(model.get_weights()))
        tell("connections", connections())
    except NebulaError as failure:
        tell("error", str(failure))
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
