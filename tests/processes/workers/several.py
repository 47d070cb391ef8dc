"""Worker: other workers of this folder, one after the other, each in a run of its own: starting a process is dear.

Arguments: a folder, and then for each a list in JSON, its name and its arguments.
"""

import json
import runpy
import sys
from pathlib import Path

import keras

from tests.processes.reopening import reconnect
from tests.processes.running import BEGINS, SEED
from whale_nebula.launch.seeding import seed_all

folder, *asked = sys.argv[1:]
for words in asked:
    name, *arguments = json.loads(words)
    print(BEGINS + name, flush=True)
    reconnect(Path(folder))
    keras.utils.clear_session()
    seed_all(SEED)  # as the launcher seeds who is run alone
    script = str(Path(__file__).with_name(f"{name}.py"))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
