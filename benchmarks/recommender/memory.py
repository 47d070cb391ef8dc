"""Fill a table with rows, and print what memory this process has. run.py starts two of these at once. Arguments: rows,
the number of this process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from whale_nebula.models.recommender import RowTable
from whale_nebula.models.recommender.row_optimizers import make_row_optimizer

BLOCK = 1 << 20


def resident() -> float:
    """GiB of this process."""
    line = next(each for each in Path("/proc/self/status").read_text("utf-8").splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 2**20


def main(rows: int, number: int) -> None:
    """Fill it, block by block, and look some rows up."""
    before, began = resident(), time.perf_counter()
    table = RowTable(16, make_row_optimizer("sgd"))
    for start in range(0, rows, BLOCK):
        ids = np.arange(start, min(start + BLOCK, rows), dtype=np.int64) * 2 + number
        table.pull(ids, np.ones(len(ids), np.int64))
    took = time.perf_counter() - began
    asked = np.unique(np.random.default_rng(0).integers(0, rows, 4096)) * 2 + number
    began = time.perf_counter()
    for _ in range(20):
        table.pull(asked, np.ones(len(asked), np.int64))
    look_up = (time.perf_counter() - began) / 20
    found = {"rows": len(table), "GiB": resident() - before, "reserved": table.reserved_bytes / 2**30, "seconds": took}
    print(json.dumps({**found, "look-up of 4,096, ms": 1e3 * look_up}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
