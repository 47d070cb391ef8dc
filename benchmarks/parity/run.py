"""Parity with the uncut model under every plan: models × stages × micro-batches × schedules.

    python benchmarks/parity/run.py            # everything, under 40 minutes; writes result.json
    python benchmarks/parity/run.py --quick    # a few models, to see that it runs; writes nothing

Every run of a plan is compared with the same script without its scope lines, in losses, metrics, gradients, weights and
all other results. The number of a model is its largest difference, relative to the tolerance: 1 is the limit. The
models are those of the tests, which run a small part of this grid each time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import describe_machine, parser, verdict, write

import whale_nebula as nb
from tests.parity.cases import CASES, list_cuts
from tests.parity_harness import Case, Cut, compare_outcomes

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = (1, 2, 4, 5)
"""Five divides none of the batches."""
PROCESSES = 2
ROW_PREFIX = "row: "

ZOO = ("functional", "subclassed", "sequential", "token_loop", "control_flow", "gan", "frozen", "inference", "scaled")
KERAS = (
    "mask_attention", "mask_translator", "mixed_bfloat16", "mixed_float16", "mixed_float16_overflows", "batch_norm",
    "norms", "nested_spanning", "shared_over_stages", "outputs_in_a_dict", "penalty_on_kernels", "own_train_step",
    "own_compute_loss", "two_optimizers", "autoencoder", "distiller", "language_model", "seq2seq", "transfer",
    "physics", "stateful_rnn", "recurrent_cells", "mixture", "towers",
)  # fmt: skip
LOOPS = (
    "tapes.penalty_in_a_stage", "tapes.recomputed", "tapes.persistent_two_losses", "edited.accumulated_under_cond",
    "optimizers.sparse_by_keras", "forwards.scan_over_time",
)  # fmt: skip
QUICK = ("zoo functional", "keras mixture", "loops tapes.recomputed")


def list_cases() -> dict[str, Case]:
    """The measured cases, with all their possible numbers of micro-batches."""
    names = (
        *(f"zoo {name}" for name in ZOO),
        *(f"keras {name}" for name in KERAS),
        *(f"loops {name}" for name in LOOPS),
    )
    return {name: replace(CASES[name], micro=MICRO_BATCHES if max(CASES[name].micro) > 1 else (1,)) for name in names}


def measure_case(name: str, case: Case) -> dict[str, Any]:
    """Run a model uncut and in every cut."""
    start = time.perf_counter()
    nb.shutdown()
    plain, worst, at, count = case.run(Cut(0)), 0.0, "", 0
    for cut, line in list_cuts(case):
        nb.shutdown()
        nb.init(links=line or None)
        found = case.run(cut)
        shares = (each for _, each in compare_outcomes(plain, found, case.tolerance, case.length))
        share = max(shares) if found.stages else math.inf
        count += 1
        if share >= worst:
            worst, at = (
                share,
                f"{cut.stages} stages, {cut.micro_batches} micro-batches, {cut.schedule if line else 'local'}",
            )
    nb.shutdown()
    gc.collect()
    return {
        "model": name, "cuts": count, "worst": float(f"{worst:.2g}"), "at": at,
        "seconds": round(time.perf_counter() - start), "verdict": verdict(worst, 1.0),
    }  # fmt: skip


def run_part(number: int, quick: bool) -> None:
    """Run one of the processes: every n-th model, a row each."""
    chosen = [(name, case) for name, case in list_cases().items() if not quick or name in QUICK]
    for name, case in chosen[number::PROCESSES]:
        print(ROW_PREFIX + json.dumps(_measure_row(name, case)), flush=True)


def _measure_row(name: str, case: Case) -> dict[str, Any]:
    """The row of a model; a failing model is a row too, so that the others are still measured."""
    try:
        return measure_case(name, case)
    except Exception as failure:
        empty = {"model": name, "cuts": 0, "worst": float("inf"), "seconds": 0}
        return {**empty, "at": str(failure), "verdict": "missed"}


def collect_rows(quick: bool) -> list[dict[str, Any]]:
    """Start the processes, and collect their rows."""
    command = [sys.executable, __file__, *["--quick"] * quick, "--part"]
    started = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for number in range(PROCESSES)
    ]
    rows = []
    for process in started:
        for line in process.stdout or ():
            if line.startswith(ROW_PREFIX):
                rows.append(json.loads(line.removeprefix(ROW_PREFIX)))
                print(rows[-1], flush=True)
        if process.wait():
            raise SystemExit(f"a process ended with {process.returncode}")
    return sorted(rows, key=lambda row: list(list_cases()).index(row["model"]))


def main() -> int:
    """Measure, print and write the result."""
    arguments = parser(__doc__, "three models; writes nothing")
    arguments.add_argument("--part", type=int, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.part is not None:
        run_part(chosen.part, chosen.quick)
        return 0
    start = time.perf_counter()
    rows = collect_rows(chosen.quick)
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(rows)} models, {sum(row['cuts'] for row in rows)} cuts, {minutes:.1f} minutes")
    if not chosen.quick:
        keys = ("model", "cuts", "worst", "at", "verdict")
        result = {"machine": describe_machine(), "minutes": round(minutes, 1), "rows": rows}
        write(__file__, result, [keys, *([row[key] for key in keys] for row in rows)])
    return int(any(row["verdict"] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
