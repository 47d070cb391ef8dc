"""Worker: train where the config says how fast workers are, and where it shows; tell what that left."""

import sys

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.telling import left, tell
from tests.processes.uneven import CONFIG, slowed
from tests.same import Cut

nb.init(CONFIG)
for name in sys.argv[1:]:
    tell(name, left(ZOO[name].run(Cut(2, 1, replicas=(1, 2)))))
    tell(f"{name} many", nb.last_report().micro_batches)
tell("slowed", slowed({"c0/0": 0.04, "c0/1": 0.01}))
report = nb.last_report()
tell("notes", [note for note in report.notes if note.startswith("plan version")])
stage = {**report.elsewhere.stages, **report.stages}["c0"]
tell("computed", [each.compute_seconds for each in stage.replicas])
