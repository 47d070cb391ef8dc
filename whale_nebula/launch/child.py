"""`python -m whale_nebula.launch.child script.py ...`: run a script as a worker, seeded before it builds anything.

Processes of one run must start from the same weights, so each sets the run's seed before the script's first line.
"""

from __future__ import annotations

import importlib
import runpy
import sys

from whale_nebula.launch.attach import attach


def main(argv: list[str]) -> None:
    """Seed this process and run the script as `__main__`."""
    attachment = attach()
    if attachment is not None and attachment.seed is not None:
        importlib.import_module("keras").utils.set_random_seed(attachment.seed)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
