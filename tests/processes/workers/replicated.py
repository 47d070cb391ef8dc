"""Worker: run models of the zoo, each as "gan,2,4,2+1" says (two stages, four micro-batches, in two replicas and one);
tell what they left. At last, spoil a replica.
"""

import sys

import keras
import numpy as np

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.telling import left, sent, tell
from tests.same import Cut

nb.init()
for argument in sys.argv[1:]:
    name, stages, micro_batches, copies = argument.split(",")
    replicas = tuple(map(int, copies.split("+")))
    tell(argument, left(ZOO[name].run(Cut(int(stages), int(micro_batches), replicas=replicas))))
    tell(f"{argument} sent", sent())


def spoiled() -> str:
    """Train a step, write a weight in one process alone, and go on: by what it ends."""
    inputs = keras.Input((4,))
    with nb.cluster(), nb.replica(2), nb.stage(cluster="c0"):
        outputs = keras.layers.Dense(1)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    x = np.ones((4, 4), "float32")
    model.train_on_batch(x, x[:, :1])
    if nb.here().worker == "c0/1":
        model.trainable_variables[0].assign(np.zeros((4, 1), "float32"))
    try:
        model.train_on_batch(x, x[:, :1])
    except nb.errors.NebulaError as error:
        return str(error)
    return ""


tell("spoiled", spoiled())
