"""Worker: run models of the zoo, cut by the arguments ("2,3": two stages, three micro-batches); tell what they left."""

import sys

import whale_nebula as nb
from tests.parity.zoo import ZOO, Cut
from tests.processes.telling import left, sent, tell

nb.init()
for argument in sys.argv[1:]:
    stages, micro_batches = map(int, argument.split(","))
    for name, trial in ZOO.items():
        tell(f"{name} {argument}", left(trial.run(Cut(stages, micro_batches))))
        tell(f"{name} {argument} sent", sent())
