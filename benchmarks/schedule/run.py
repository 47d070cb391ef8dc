"""Eager-1F1B compared with 1F1B over a line as slow as the stages: real steps, real actors, emulated lines.

    python benchmarks/schedule/run.py            # about a minute and a half; writes result.json
    python benchmarks/schedule/run.py --quick    # few steps; writes nothing

Two stages in two clusters, 16 micro-batches; each message occupies the line, in either direction, as long as a stage
computes for a micro-batch. Two kinds of stage, each of fixed compute:

* `waits`: a Python function inside the graph that takes 10 ms forward and 20 ms backward. The machine's own
  speed plays no part: what is measured is when the runtime sends and starts, and what it adds.
* `works`: products of matrices, one thread a stage. Stages disturb each other as far as cores share caches
  and memory; the line is set to what a stage was seen to take over such a line.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from closed_form import eager_seconds, one_f_one_b_seconds
from common import describe_machine, parser, verdict, write

import whale_nebula as nb
from whale_nebula.wire.frame import count_wire_bytes

MICRO_BATCHES, STEPS, WARM = 16, 20, 4
FORWARD, BACKWARD = 0.010, 0.020
WIDTH, ROWS, LAYERS = 512, 128, 20
MESSAGE = count_wire_bytes(4 * WIDTH * ROWS)
SCHEDULES = ("1f1b", "eager-1f1b")
FASTER_BAR, SIMULATOR_BAR = 1.55, 0.15
Stage = Callable[[Any], Any]


def make_waiting_stage() -> tuple[Stage, list[Any]]:
    """A stage that takes a fixed time on any machine."""
    scale = tf.Variable(1.0)

    @tf.custom_gradient
    def slow(x: Any) -> Any:
        return _pass_after(FORWARD, x), lambda gradient: _pass_after(BACKWARD, gradient)

    return lambda x: slow(x * scale), [scale]


def _pass_after(seconds: float, x: Any) -> Any:
    """The same tensor, after `seconds`."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    later = tf.numpy_function(wait, [x], x.dtype)
    later.set_shape(x.shape)
    return later


def make_working_stage() -> tuple[Stage, list[Any]]:
    """A stage that multiplies matrices."""
    random = np.random.default_rng(0)
    values = random.standard_normal((LAYERS, WIDTH, WIDTH)).astype("float32") / WIDTH**0.5
    kernels = [tf.Variable(value) for value in values]

    def stage(x: Any) -> Any:
        for kernel in kernels:
            x = tf.tanh(x @ kernel)
        return x

    return stage, kernels


KINDS = {"waits": make_waiting_stage, "works": make_working_stage}


def make_training_step(kind: str, schedule: str) -> Callable[[Any], Any]:
    """A step of gradient descent through two stages."""
    (first, some), (second, others) = KINDS[kind](), KINDS[kind]()
    # the effect of a Python function on the rows of a batch is unknown: hence coupled="allow"
    coupled = "allow" if kind == "waits" else "error"

    @nb.function
    def step(x: Any) -> Any:
        pipeline = nb.pipeline(MICRO_BATCHES, schedule=schedule, coupled=coupled)
        with tf.GradientTape() as tape, nb.cluster(), pipeline:
            with nb.stage(cluster="left"):
                hidden = first(x)
            with nb.stage(cluster="right"):
                loss = tf.reduce_mean(tf.square(second(hidden)))
        for variable, gradient in zip([*some, *others], tape.gradient(loss, [*some, *others]), strict=True):
            variable.assign_sub(1e-3 * gradient)
        return loss

    return step


def run_steps(kind: str, over: str, steps: int) -> dict[str, list[nb.Report]]:
    """Run both schedules alternately over the same kind of line; the first steps only set the limits."""
    x = np.random.default_rng(1).standard_normal((ROWS * MICRO_BATCHES, WIDTH)).astype("float32")
    with nb.init(links=over):
        trained = {schedule: make_training_step(kind, schedule) for schedule in SCHEDULES}
        found: dict[str, list[nb.Report]] = {schedule: [] for schedule in SCHEDULES}
        for _ in range(WARM + steps):
            for schedule, step in trained.items():
                step(x)
                found[schedule].append(nb.last_report())
    return {schedule: reports[WARM:] for schedule, reports in found.items()}


def find_compute_seconds(reports: Sequence[nb.Report]) -> float:
    """The computing time of the slower stage for a micro-batch."""
    medians = [
        statistics.median(report.stages[name].compute_seconds or 0.0 for report in reports)
        for name in reports[0].stages
    ]
    return max(medians) / MICRO_BATCHES


def make_link(compute: float) -> str:
    """A line that a message occupies for this time."""
    return f"{8 * MESSAGE / compute / 1e6:.6f}mbit,0ms"


def measure(kind: str, steps: int) -> dict[str, Any]:
    """Steps over a line that a message occupies for as long as a stage computes."""
    compute = FORWARD + BACKWARD
    for _ in range(3 if kind == "works" else 0):
        compute = find_compute_seconds(run_steps(kind, make_link(compute), 4)["eager-1f1b"])
    reports = run_steps(kind, make_link(compute), steps)
    rows = {schedule: _summarize_reports(own) for schedule, own in reports.items()}
    ideal = {
        "1f1b": one_f_one_b_seconds(MICRO_BATCHES, compute, compute),
        "eager-1f1b": eager_seconds(2, MICRO_BATCHES, compute, compute),
    }
    for schedule, row in rows.items():
        row["closed_form_s"] = round(ideal[schedule], 4)
    faster = rows["1f1b"]["step_s"] / rows["eager-1f1b"]["step_s"]
    return {
        "stages": kind,
        "line_holds_ms": round(1e3 * compute, 2),
        "schedules": rows,
        "eager_faster": round(faster, 3),
        "ideal": round(ideal["1f1b"] / ideal["eager-1f1b"], 3),
        "bar": FASTER_BAR,
        "verdict": verdict(faster, FASTER_BAR, least=True),
    }


def _summarize_reports(reports: Sequence[nb.Report]) -> dict[str, Any]:
    step = statistics.median(report.step_seconds for report in reports)
    simulated = statistics.median(report.predicted_seconds or 0.0 for report in reports)
    return {
        "step_s": round(step, 4),
        "compute_ms": round(1e3 * find_compute_seconds(reports), 2),
        "simulator_s": round(simulated, 4),
        "off_simulator": round(step / simulated - 1.0, 4),
        "verdict": verdict(abs(step / simulated - 1.0), SIMULATOR_BAR),
    }


def format_table(results: list[dict[str, Any]]) -> list[list[object]]:
    """The rows of the README's table."""
    rows: list[list[object]] = [["stages", "1f1b", "eager-1f1b", "eager is faster by", "ideal", "bar", ""]]
    for row in results:
        steps = [
            f"{own['step_s']:.3f} s ({own['off_simulator']:+.1%} of the simulator's)"
            for own in row["schedules"].values()
        ]
        rows.append([row["stages"], *steps, row["eager_faster"], row["ideal"], f"≥ {row['bar']}", row["verdict"]])
    return rows


def main() -> None:
    """Measure both kinds of stage and write the result."""
    quick = parser(__doc__, "few steps; writes nothing").parse_args().quick
    tf.config.threading.set_intra_op_parallelism_threads(1)
    here, results = describe_machine(), []
    for kind in KINDS:
        results.append(measure(kind, 4 if quick else STEPS))
        print(results[-1], flush=True)
    if not quick:
        about = {"machine": here, "micro_batches": MICRO_BATCHES, "steps": STEPS}
        write(__file__, {**about, "results": results}, format_table(results))


if __name__ == "__main__":
    main()
