"""Worker: run models of the zoo, each as "gan,2,3" says (two stages, three micro-batches); tell what they left."""

import sys

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.telling import left, sent, tell
from tests.same import Cut

nb.init()
for argument in sys.argv[1:]:
    name, stages, micro_batches = argument.split(",")
    tell(argument, left(ZOO[name].run(Cut(int(stages), int(micro_batches)))))
    tell(f"{argument} sent", sent())
