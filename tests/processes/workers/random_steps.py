"""Worker: the steps of `test_random_steps`, whose texts are in a file; for one that is refused, the error's code."""

import json
import sys
from pathlib import Path

import whale_nebula as nb
from tests.processes.random_steps import REFUSALS, run_step
from tests.processes.worker_reports import report_value
from tests.processes.worker_runs import SEED

nb.init(seed=SEED)  # random rounding of codecs has the seed of the run
for name, text in json.loads(Path(sys.argv[1]).read_text()).items():
    try:
        report_value(name, run_step(text, nb, name))
    except REFUSALS as refusal:
        report_value(name, refusal.code)
