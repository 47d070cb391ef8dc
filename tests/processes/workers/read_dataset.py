"""Worker: trains on a dataset of gpu's owner: on the owner's machine in gpu, and over a line elsewhere."""

from __future__ import annotations

import hashlib
import json
import sys

import keras
import tensorflow as tf

import whale_nebula as nb
from tests.processes.worker_reports import report_value

nb.init({"data": {"gpu": json.loads(sys.argv[1])}})
inputs = keras.Input((1,))
with nb.cluster():
    with nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(4)(inputs)
    with nb.stage(cluster="npu"):
        outputs = keras.layers.Dense(1)(hidden)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.SGD(1e-5), "mse")


def make_pair(row):
    age = tf.cast(row["age"], tf.float32)[:, None]
    return age, 2 * age


dataset = nb.data("gpu://corpus", batch=40, seed=2).map(make_pair)
history = model.fit(dataset, epochs=2, verbose=0)
with nb.gathered():
    values = b"".join(value.tobytes() for value in model.get_weights())
report_value("weights", hashlib.sha256(values).hexdigest())
report_value("loss", history.history["loss"])
