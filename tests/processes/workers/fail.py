"""Worker: saves in memory every two steps, and ends by an error of its own that a restart would repeat."""

import sys

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.workers.restart import taught
from tests.processes.workers.resume import Told
from whale_nebula.errors import ConfigError

LAST = 7
"""The step after which it ends."""


class Breaks(keras.callbacks.Callback):
    """Ends the script by an error."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch + 1 == LAST:
            raise ConfigError("the script ends here")


if __name__ == "__main__":
    with nb.init(checkpoint={"folder": sys.argv[1], "every": 1000, "memory": 2}):
        model = taught()
        x, y = np.ones((8 * LAST + 8, 6), "float32"), np.ones((8 * LAST + 8, 3), "float32")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Told(0.0), Breaks()])
