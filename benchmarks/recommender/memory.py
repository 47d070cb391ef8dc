"""Fill one worker's share of a table with rows, and print this process's memory. run.py starts two of these at once.
Arguments: rows of the whole table, the number of this process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from whale_nebula.models.recommender import RowTable
from whale_nebula.models.recommender.row_optimizers import make_row_optimizer
from whale_nebula.models.recommender.shares import BUCKETS, Share

BLOCK, WORKERS = 1 << 20, 2


def read_memory(what: str) -> float:
    """GiB of this process: current (VmRSS) or peak (VmHWM)."""
    line = next(each for each in Path("/proc/self/status").read_text("utf-8").splitlines() if each.startswith(what))
    return int(line.split()[1]) / 2**20


def main(rows: int, number: int) -> None:
    """Fill the share block by block, as steps that request all ids from both workers, and look some rows up."""
    before, began = read_memory("VmRSS"), time.perf_counter()
    table = RowTable(16, make_row_optimizer("sgd"))
    table.hold(Share(number * BUCKETS // WORKERS, BUCKETS // WORKERS))
    filled, spent = [0], [time.process_time()]
    for start in range(0, rows, BLOCK):
        ids = np.arange(start, min(start + BLOCK, rows), dtype=np.int64)
        table.pull(ids, np.ones(len(ids), np.int64))
        if (start + BLOCK) * 10 >= rows * len(filled):
            filled.append(len(table))
            spent.append(time.process_time())
    took = time.perf_counter() - began
    tenths = 1e6 * np.diff(spent) / np.diff(filled)
    asked = np.unique(np.random.default_rng(0).integers(0, rows, 4096))
    spent_before = time.process_time()
    for _ in range(20):
        table.pull(asked, np.ones(len(asked), np.int64))
    look_up = (time.process_time() - spent_before) / 20
    found = {"rows": len(table), "GiB": read_memory("VmRSS") - before, "most GiB": read_memory("VmHWM") - before}
    found |= {"seconds": took, "us a new row": tenths.tolist(), "ms a look-up": 1e3 * look_up}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
