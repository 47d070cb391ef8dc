"""Whatever the plan, the model is the uncut one: models × stages × micro-batches × schedules.

    python benchmarks/parity/run.py            # everything, under 40 minutes; writes result.json
    python benchmarks/parity/run.py --quick    # a few models, to see that it runs; writes nothing

Every run of a plan is compared with the same script without its scope lines, in losses, metrics, gradients, weights and
whatever else it returned. The number for a model is its worst difference, as a share of what parity allows: 1 is the
limit. The models are those of the tests, where a small part of this grid runs each time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from common import machine, verdict, write

import whale_nebula as nb

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = (1, 2, 4, 5)
"""Five divides none of the batches."""
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")
LINE = "10gbit,0ms"
PROCESSES = 2
MARK = "row: "

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


@dataclass(frozen=True)
class Model:
    """A script that can be run under a cut, and how far what it left is from what the uncut one left."""

    name: str
    stages: tuple[int, ...]
    micro: tuple[int, ...]
    run: Callable[[Any], Any]
    apart: Callable[[Any, Any], float]


def models() -> Iterator[Model]:
    """All models, by family."""
    zoo = importlib.import_module("tests.parity.zoo")
    for name in ZOO:
        trial = zoo.ZOO[name]
        yield Model(f"zoo {name}", trial.stages, MICRO_BATCHES, trial.run, _outcomes(trial.rate * trial.steps, 1e-5))
    scripts = importlib.import_module("tests.scripts.keras.models").SCRIPTS
    for name in KERAS:
        script = scripts[name]
        micro = MICRO_BATCHES if max(script.micro) > 1 else (1,)
        yield Model(
            f"keras {name}", script.stages, micro, script.run, _outcomes(script.rate * script.steps, script.precision)
        )
    book = importlib.import_module("tests.scripts.loops.book")
    scripts_of_loops = book.opened()
    for name in LOOPS:
        entry = scripts_of_loops[name]
        micro = MICRO_BATCHES if max(entry.micro) > 1 else (1,)
        yield Model(f"loops {name}", entry.stages, micro, _loop(book, entry), _lefts)


def _loop(book: Any, entry: Any) -> Callable[[Any], Any]:
    def run(cut: Any) -> Any:
        own = book.Cut(cut.stages, cut.micro_batches, cut.schedule)
        return book.run(entry.build, own)

    return run


def _outcomes(length: float, precision: float) -> Callable[[Any, Any], float]:
    """How far two outcomes are apart; `length` is the learning rate times the number of steps."""

    def apart(plain: Any, cut: Any) -> float:
        if sorted(plain.history) != sorted(cut.history) or not cut.stages:
            return float("inf")
        found = [_far(plain.losses, cut.losses, precision, 1e-8)]
        found += [_far(plain.history[key], cut.history[key], precision, 1e-8) for key in plain.history]
        largest = max((float(np.linalg.norm(g)) for g in plain.gradients), default=0.0)
        found += _all(plain.gradients, cut.gradients, precision, precision * 1e-3 * largest)
        found += _all(plain.weights, cut.weights, precision, 1e-3 * length)
        found += _all(plain.outputs, cut.outputs, precision, max(1e-6, 1e-3 * length))
        return max(found)

    return apart


def _lefts(plain: Any, cut: Any) -> float:
    if plain.others != cut.others or not cut.stages:
        return float("inf")
    return max(_all(plain.numbers, cut.numbers, 1e-5, 1e-6), default=0.0)


def _all(expected: Sequence[Any], found: Sequence[Any], relative: float, absolute: float) -> list[float]:
    if len(expected) != len(found):
        return [float("inf")]
    return [_far(a, b, relative, absolute) for a, b in zip(expected, found, strict=True)]


def _far(expected: Any, found: Any, relative: float, absolute: float) -> float:
    """The distance as a share of what is allowed."""
    a, b = np.asarray(expected, "complex128"), np.asarray(found, "complex128")
    if a.shape != b.shape:
        return float("inf")
    same = np.isnan(a) & np.isnan(b)
    a, b = np.where(same, 0.0, a), np.where(same, 0.0, b)
    return float(np.linalg.norm(a - b) / (relative * np.linalg.norm(a) + absolute))


def cuts(model: Model) -> Iterator[tuple[Any, str]]:
    """Every cut of a model, each with the lines it runs over: none for one function, else actors."""
    zoo = importlib.import_module("tests.parity.zoo")
    for stages in model.stages:
        for micro_batches in model.micro:
            yield zoo.Cut(stages, micro_batches), ""
    if 3 in model.stages:
        for schedule in SCHEDULES:
            yield zoo.Cut(3, max(model.micro), schedule), LINE


def measured(model: Model) -> dict[str, Any]:
    """Run a model uncut and in every cut."""
    start = time.perf_counter()
    nb.shutdown()
    plain, worst, at, count = model.run(importlib.import_module("tests.parity.zoo").Cut(0)), 0.0, "", 0
    for cut, line in cuts(model):
        nb.shutdown()
        nb.init(links=line or None)
        share = model.apart(plain, model.run(cut))
        count += 1
        if share >= worst:
            worst, at = (
                share,
                f"{cut.stages} stages, {cut.micro_batches} micro-batches, {cut.schedule if line else 'local'}",
            )
    nb.shutdown()
    gc.collect()
    return {
        "model": model.name, "cuts": count, "worst": float(f"{worst:.2g}"), "at": at,
        "seconds": round(time.perf_counter() - start), "verdict": verdict(worst, 1.0),
    }  # fmt: skip


def part(number: int, quick: bool) -> None:
    """Be one of the processes: every n-th model, a row each."""
    chosen = [model for model in models() if not quick or model.name in QUICK]
    for model in chosen[number::PROCESSES]:
        print(MARK + json.dumps(_row(model)), flush=True)


def _row(model: Model) -> dict[str, Any]:
    """A model that fails is a row too: the others are still measured."""
    try:
        return measured(model)
    except Exception as failure:
        empty = {"model": model.name, "cuts": 0, "worst": float("inf"), "seconds": 0}
        return {**empty, "at": str(failure), "verdict": "missed"}


def all_rows(quick: bool) -> list[dict[str, Any]]:
    """Start the processes, and take their rows as they come."""
    command = [sys.executable, __file__, *["--quick"] * quick, "--part"]
    started = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for number in range(PROCESSES)
    ]
    rows = []
    for process in started:
        for line in process.stdout or ():
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
                print(rows[-1], flush=True)
        if process.wait():
            raise SystemExit(f"a process ended with {process.returncode}")
    return sorted(rows, key=lambda row: [model.name for model in models()].index(row["model"]))


def main() -> int:
    """Measure, print, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="three models; writes nothing")
    arguments.add_argument("--part", type=int, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.part is not None:
        part(chosen.part, chosen.quick)
        return 0
    start = time.perf_counter()
    rows = all_rows(chosen.quick)
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(rows)} models, {sum(row['cuts'] for row in rows)} cuts, {minutes:.1f} minutes")
    if not chosen.quick:
        keys = ("model", "cuts", "worst", "at", "verdict")
        result = {"machine": machine(), "minutes": round(minutes, 1), "rows": rows}
        write(__file__, result, [keys, *([row[key] for key in keys] for row in rows)])
    return int(any(row["verdict"] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
