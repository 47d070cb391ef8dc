"""Worker: run models of the zoo, each as "gan,2,4,2+1" says (two stages, four micro-batches, in two replicas and one);
tell what they left.
"""

import sys

import whale_nebula as nb
from tests.parity.zoo import ZOO, Cut
from tests.processes.telling import left, sent, tell

nb.init()
for argument in sys.argv[1:]:
    name, stages, micro_batches, copies = argument.split(",")
    replicas = tuple(map(int, copies.split("+")))
    tell(argument, left(ZOO[name].run(Cut(int(stages), int(micro_batches), replicas=replicas))))
    tell(f"{argument} sent", sent())
