"""Two clusters of two workers each; of the second the config says that one is twice as fast."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.same import data

WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1", "c1/1": "c1"}
CONFIG: dict[str, Any] = {
    "clusters": {
        "c0": {"workers": ["127.0.0.1:7000", "127.0.0.1:7001"]},
        "c1": {"workers": [{"address": "127.0.0.1:7002"}, {"address": "127.0.0.1:7003", "speed": 2}]},
    }
}
STEPS = 7
X, Y = data(18, 6), data(18, 3, seed=1)


def slowed(seconds: dict[str, float]) -> list[float]:
    """Train two stages of two replicas each; on cluster c0 each worker sleeps so long for a micro-batch. The losses."""
    keras.utils.set_random_seed(8)
    weight, wide = tf.Variable(0.3 * data(6, 3, seed=2)), tf.constant(data(3, 12, seed=3))

    def rest(rows: np.ndarray) -> np.ndarray:
        time.sleep(seconds.get(nb.here().worker, 0.0))
        return rows

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.replica(2), nb.pipeline(6, coupled="allow"):
            with nb.stage(cluster="c0"), nb.compress(fp16=True, backward=None):
                slept = tf.numpy_function(rest, [x], tf.float32)
                slept.set_shape(x.shape)
                hidden = slept @ weight @ wide
            with nb.stage(cluster="c1"):
                loss = tf.reduce_mean((hidden[:, :3] - y) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return [float(step(X, Y)) for _ in range(STEPS)]
