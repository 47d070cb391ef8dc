"""A worker that trains and evaluates small models, cut over three clusters."""

import json
import sys
from typing import Any

import keras

import whale_nebula as nb
from tests.processes.measuring import result_of
from tests.processes.telling import tell

nb.init()
folder, replicated = sys.argv[2:]
loggers: list[Any] = [
    keras.callbacks.CSVLogger(f"{folder}/log.csv", append=True),
    keras.callbacks.TensorBoard(f"{folder}/events"),
]
for extra, place in json.loads(sys.argv[1]):
    tell(f"{extra} {place}", result_of(extra, place, cut=True, loggers=loggers, replicated=replicated))
    loggers = []
nb.shutdown()
