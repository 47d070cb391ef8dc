"""The overhead of a plan without slow lines: steps, time to the first step, and memory, relative to plain Keras.

    python benchmarks/overhead/run.py            # everything; writes result.json
    python benchmarks/overhead/run.py --quick    # a few pairs, to see that it runs; writes nothing

Every result is a ratio of two quantities measured alternately in this run, so that disturbances affect both.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from common import describe_machine, parser, spread, verdict, write

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer

SIZES = Sizes(vocabulary=1000, length=64, width=256, heads=4, blocks=4)
ROWS = 32
PAIRS, WARM = 48, 4
MEMORY_STEPS = 12
START_ROUNDS = 3
PLAN_BAR, MEMORY_BAR = 3.0, 1.15
UNITS = {"peak_mib": "MiB", "step_ms": "ms", "own_s": "s"}


@dataclass(frozen=True)
class Variant:
    """A variant of the same step; `bar` is the limit of its ratio to plain Keras."""

    name: str
    stages: int
    micro_batches: int
    bar: float


PLAIN = Variant("plain", 0, 1, 1.0)
CUT = (
    Variant("one stage", 1, 1, 1.03),
    Variant("two stages", 2, 1, 1.08),
    Variant("two stages, four micro-batches", 2, 4, 1.15),
)


def build_model(variant: Variant) -> keras.Model:
    """The compiled transformer with the variant's scopes."""
    keras.utils.set_random_seed(1)
    if variant.stages:
        with nb.cluster(), nb.pipeline(variant.micro_batches):
            model = transformer(SIZES, around=lambda block: _open_stage(variant, block))
    else:
        model = transformer(SIZES)
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _open_stage(variant: Variant, block: int) -> contextlib.AbstractContextManager[Any]:
    return nb.stage(cluster=f"c{block * variant.stages // SIZES.blocks}")


def draw_batch() -> tuple[np.ndarray, np.ndarray]:
    """A batch of tokens with the next tokens as targets."""
    tokens = np.random.default_rng(0).integers(0, SIZES.vocabulary, (ROWS, SIZES.length + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


class Stepper:
    """Runs single steps as `fit` does: calls the train function with the iterator, and reads the loss."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.model = build_model(variant)
        self.function = self.model.make_train_function()
        self.iterator = iter(tf.data.Dataset.from_tensors(draw_batch()).repeat().prefetch(2))
        self.losses: list[float] = []

    def step(self) -> float:
        """Run one step; returns its seconds."""
        start = time.perf_counter()
        self.losses.append(float(self.function(self.iterator)["loss"]))
        return time.perf_counter() - start


def measure_steps(pairs: int) -> list[dict[str, Any]]:
    """Each round runs one step of plain Keras and of every variant, in an order that rotates."""
    steppers = [Stepper(variant) for variant in (PLAIN, *CUT)]
    for _ in range(WARM):
        for stepper in steppers:
            stepper.step()
    seconds_by_variant: dict[str, list[float]] = {stepper.variant.name: [] for stepper in steppers}
    gc.disable()
    for turn in range(pairs):
        shift = turn % len(steppers)
        for stepper in steppers[shift:] + steppers[:shift]:
            seconds_by_variant[stepper.variant.name].append(stepper.step())
        gc.collect(0)
    gc.enable()
    plain_losses = steppers[0].losses
    return [_make_step_row(stepper, seconds_by_variant, plain_losses) for stepper in steppers]


def _make_step_row(
    stepper: Stepper, seconds_by_variant: dict[str, list[float]], plain_losses: list[float]
) -> dict[str, Any]:
    variant, own = stepper.variant, seconds_by_variant[stepper.variant.name]
    ratio = spread([a / b for a, b in zip(own, seconds_by_variant[PLAIN.name], strict=True)])
    furthest = max(abs(a - b) / b for a, b in zip(stepper.losses, plain_losses, strict=True))
    return {
        "what": f"step, {variant.name}",
        "step_ms": round(1e3 * statistics.median(own), 2),
        "ratio": ratio,
        "bar": variant.bar,
        "verdict": verdict(ratio["median"], variant.bar),
        "loss_differs_by": float(f"{furthest:.1e}"),
    }


def measure_start(times: int) -> list[dict[str, Any]]:
    """Seconds until a step can run, and until one has run; without the first measurement of each."""
    x, y = draw_batch()
    traced, planned = [], []
    first: dict[Variant, list[float]] = {variant: [] for variant in (PLAIN, *CUT)}
    for _ in range(times + 1):
        model = build_model(PLAIN)
        traced.append(_time_call(lambda model=model: _trace_step(model, x, y)))
        model = build_model(CUT[-1])
        planned.append(_time_call(lambda model=model: nb.plan(model, x, y)))
        for variant, own in first.items():
            own.append(Stepper(variant).step())
    rows = [_make_start_row("tracing and planning", planned[1:], traced[1:])]
    return rows + [_make_start_row(f"first step, {v.name}", first[v][1:], first[PLAIN][1:]) for v in CUT]


def _make_start_row(what: str, own: list[float], plain: list[float]) -> dict[str, Any]:
    ratio = spread([a / b for a, b in zip(own, plain, strict=True)])
    return {
        "what": what,
        "plain_s": round(statistics.median(plain), 3),
        "own_s": round(statistics.median(own), 3),
        "ratio": ratio,
        "bar": PLAN_BAR,
        "verdict": verdict(ratio["median"], PLAN_BAR),
    }


def _trace_step(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    specs = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in (x, y))
    tf.function(model.train_step).get_concrete_function(specs)


def _time_call(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_memory() -> list[dict[str, Any]]:
    """Peak resident memory, each variant in a separate process."""
    peaks = {variant: _measure_peak(variant) for variant in (PLAIN, *CUT)}
    return [_make_memory_row(variant.name, peak, peak / peaks[PLAIN]) for variant, peak in peaks.items()]


def _make_memory_row(name: str, peak: float, ratio: float) -> dict[str, Any]:
    return {
        "what": f"memory, {name}",
        "peak_mib": round(peak),
        "ratio": round(ratio, 3),
        "bar": MEMORY_BAR,
        "verdict": verdict(ratio, MEMORY_BAR),
    }


def _measure_peak(variant: Variant) -> float:
    command = [sys.executable, __file__, "--peak", variant.name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return float(done.stdout.split()[-1])


def print_peak(name: str) -> None:
    """Run some steps in a separate process, and print the peak (VmHWM) in MiB.

    VmHWM is of this program only; ru_maxrss would include the parent's at the fork.
    """
    stepper = Stepper(next(variant for variant in (PLAIN, *CUT) if variant.name == name))
    for _ in range(MEMORY_STEPS):
        stepper.step()
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)


def list_table_rows(results: list[dict[str, Any]]) -> list[list[object]]:
    """The rows of the README's table."""
    rows: list[list[object]] = [["what", "measured", "ratio to plain Keras", "bar", ""]]
    for row in results:
        ratio = row["ratio"]
        ratio_text = (
            f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if isinstance(ratio, dict) else ratio
        )
        unit = next(name for name in ("peak_mib", "step_ms", "own_s") if name in row)
        plain = row["what"].endswith(PLAIN.name)
        bar = ["", ""] if plain else [f"≤ {row['bar']:.2f}", row["verdict"]]
        rows.append([row["what"], f"{row[unit]} {UNITS[unit]}", "" if plain else ratio_text, *bar])
    return rows


def main() -> None:
    """Run all parts and write the result."""
    argument_parser = parser(__doc__, "a few pairs only; writes nothing")
    argument_parser.add_argument("--peak", metavar="VARIANT", help="(the memory part's own) print one variant's peak")
    options = argument_parser.parse_args()
    if options.peak:
        print_peak(options.peak)
        return
    here = describe_machine()
    parts: tuple[Callable[[], list[dict[str, Any]]], ...] = (
        measure_memory,
        lambda: measure_steps(8 if options.quick else PAIRS),
        lambda: measure_start(2 if options.quick else START_ROUNDS),
    )
    results = []
    for part in parts:
        for row in part():
            print(row, flush=True)
            results.append(row)
    if not options.quick:
        settings = {"sizes": vars(SIZES), "rows": ROWS, "pairs": PAIRS}
        write(__file__, {"machine": here, **settings, "results": results}, list_table_rows(results))


if __name__ == "__main__":
    main()
