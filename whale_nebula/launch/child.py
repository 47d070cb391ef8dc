"""`python -m whale_nebula.launch.child script.py ...`: run a script as a worker, seeded before it builds anything.

Processes of one run must start from the same weights, so each sets the run's seed before the script's first line.
A script that ends by an error says so to the others, who would wait for it in vain.
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
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except BaseException as failure:
        if not (isinstance(failure, SystemExit) and failure.code in (None, 0)):
            importlib.import_module("whale_nebula.run").report_failure(failure)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
