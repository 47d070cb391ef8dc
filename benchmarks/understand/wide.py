"""Fine-tuning at BERT-base's width on the task `opinion`, cut in the last layer but one at rank 8 = H / 96, without and
with int4.

    python benchmarks/understand/wide.py             # what is missing: half an hour on two idle cores
    python benchmarks/understand/wide.py --seeds 2   # of one seed
    python benchmarks/understand/wide.py --table     # what there is so far

Training ends after the first epoch whose mean loss is below ENOUGH. Each result is a line of wide.jsonl at once: it can
be interrupted, and continued with the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import describe_machine, read_finished_runs, write
from benchmarks.understand.tuning import BATCH, SIZES, Setup, language_model, tune

RESULTS = Path(__file__).with_name("wide.jsonl")
ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 0.02
SETUP = Setup(replace(SIZES, width=768, heads=12, layers=2, inner=1536, length=18), 400, 5e-4, 2e-4, enough=ENOUGH)
TASK, RANK, LAST_BUT_ONE, SEEDS = "opinion", 8, 0, (1, 2, 3)
CONTENDERS = ("uncut", "svd", "svd int4")
WHOLE = 4 * SETUP.sizes.width * SETUP.sizes.length * BATCH


def run_missing(seeds: Sequence[int], contenders: Sequence[str]) -> None:
    """Run the cases that are missing, and save each."""
    weights, words = language_model(ROOT / "build", SETUP)
    for seed, contender in product(seeds, contenders):
        if any((each["contender"], each["seed"]) == (contender, seed) for each in read_finished_runs(RESULTS)):
            continue
        began = time.monotonic()
        found = tune(TASK, contender, LAST_BUT_ONE, RANK, seed, weights, words, SETUP)
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(contender, seed, found["accuracy"], found["loss"], f"{time.monotonic() - began:.0f} s", flush=True)


def tabulate(found: list[dict[str, Any]]) -> list[list[object]]:
    """A line for each contender and seed."""
    rows: list[list[object]] = [["what crosses", "seed", "fewer bytes there, back", "accuracy", "learned in epoch"]]
    for contender, seed in product(CONTENDERS, SEEDS):
        own = [each for each in found if (each["contender"], each["seed"]) == (contender, seed)]
        if not own:
            rows.append([contender, seed, *["not measured"] * 3])
        for each in own:
            fewer = ", ".join(f"{WHOLE / each[way]:.0f}" for way in ("there", "back")) if "there" in each else "1, 1"
            epoch = next((at for at, loss in enumerate(each["loss"], 1) if loss < ENOUGH), "none")
            rows.append([contender, seed, fewer, f"{100 * each['accuracy']:.1f}", epoch])
    return rows


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS)
    parser.add_argument("--only", choices=CONTENDERS, nargs="+", default=CONTENDERS, help="some contenders")
    options = parser.parse_args()
    if not options.table:
        run_missing(options.seeds, options.only)
    found = read_finished_runs(RESULTS)
    write(__file__, {"machine": describe_machine(), "found": found}, tabulate(found), "wide")


if __name__ == "__main__":
    main()
