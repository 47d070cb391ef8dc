"""Worker: train models with synchronized batch normalisation, each as "trained,2+3" says; tell what they left."""

import sys

import whale_nebula as nb
from tests.processes.synchronized import CASES, within
from tests.processes.telling import tell

nb.init()
for argument in sys.argv[1:]:
    name, copies = argument.split(",")
    try:
        tell(argument, CASES[name](within(tuple(map(int, copies.split("+"))))))
        tell(f"{argument} notes", [*nb.last_report().notes])
    except nb.errors.BatchCoupledError as error:
        tell(argument, str(error))
