"""What `backing` does, where each cluster keeps its own weights. Argument: a folder."""

import runpy
from pathlib import Path

import whale_nebula as nb

nb.init({"weights": "own"})
runpy.run_path(str(Path(__file__).with_name("backing.py")), run_name="__main__")
