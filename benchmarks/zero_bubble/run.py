"""Zero-bubble compared with eager-1F1B: two and four stages, free lines and lines as slow as the stages, emulated.

    python benchmarks/zero_bubble/run.py            # about two minutes; writes result.json
    python benchmarks/zero_bubble/run.py --quick    # few steps of the smallest case; writes nothing

A stage waits for fixed times instead of computing: 10 ms forward, 10 ms for the gradient of its input, 10 ms for that
of its weight. So four stages overlap on two cores as they would on separate machines, and the measurement shows when
the runtime starts and sends, and its overhead. Both schedules alternate.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from common import describe_machine, parser, verdict, write

import whale_nebula as nb
from whale_nebula.schedule.lines import Work, make_uniform_hops
from whale_nebula.schedule.simulate import simulate
from whale_nebula.wire.frame import count_wire_bytes

STEPS, WARM = 12, 4
PART = 0.010
COMPUTE = 3 * PART
WIDTH, ROWS = 64, 32
MESSAGE = count_wire_bytes(4 * WIDTH * ROWS)
SCHEDULES = ("eager-1f1b", "zero-bubble")
LINES = {"free": f"{1e6:.0f}mbit,0ms", "as slow as a stage": f"{8 * MESSAGE / COMPUTE / 1e6:.6f}mbit,0ms"}
BAR = 0.10


def _pass_after(device: threading.Lock, seconds: float, x: Any) -> Any:
    """The same tensor, after a device was busy for `seconds`; a device does one thing at a time."""

    def wait(array: np.ndarray) -> np.ndarray:
        with device:
            time.sleep(seconds)
        return array

    later = tf.numpy_function(wait, [x], x.dtype, stateful=False)
    later.set_shape(x.shape)
    return later


def make_slow_product(back: float, weights: float) -> Callable[[Any, Any], Any]:
    """A product on a separate device with gradients that take fixed times: of its input, and of its kernel."""
    device = threading.Lock()

    @tf.custom_gradient
    def product(x: Any, kernel: Any) -> Any:
        def gradients(upstream: Any) -> Any:
            of_input = tf.matmul(upstream, kernel, transpose_b=True)
            of_kernel = tf.matmul(x, upstream, transpose_a=True)
            return _pass_after(device, back, of_input), _pass_after(device, weights, of_kernel)

        return _pass_after(device, PART, x @ kernel), gradients

    return product


def make_training_step(stages: int, micro_batches: int, schedule: str) -> Callable[[Any], Any]:
    """A step of gradient descent through these stages; the first has no input gradient, so its weight's takes both
    times.
    """
    kernels = [tf.Variable(tf.eye(WIDTH)) for _ in range(stages)]
    products = [make_slow_product(0.0, 2 * PART), *(make_slow_product(PART, PART) for _ in range(stages - 1))]

    @nb.function
    def step(x: Any) -> Any:
        # the effect of a Python function on the rows of a batch is unknown: hence coupled="allow"
        pipeline = nb.pipeline(micro_batches, schedule=schedule, coupled="allow")
        with tf.GradientTape() as tape, nb.cluster(), pipeline:
            for number, (product, kernel) in enumerate(zip(products, kernels, strict=True)):
                with nb.stage(cluster=f"c{number}"):
                    x = product(x, kernel)
                    loss = tf.reduce_mean(tf.square(x)) if number == stages - 1 else None
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(1e-3 * gradient)
        return loss

    return step


def run_steps(stages: int, micro_batches: int, over: str, steps: int) -> dict[str, list[nb.Report]]:
    """Run both schedules alternately over the same kind of line; the first steps only set the limits."""
    x = np.random.default_rng(1).standard_normal((ROWS * micro_batches, WIDTH)).astype("float32")
    with nb.init(links=over):
        trained = {schedule: make_training_step(stages, micro_batches, schedule) for schedule in SCHEDULES}
        found: dict[str, list[nb.Report]] = {schedule: [] for schedule in SCHEDULES}
        losses: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
        for _ in range(WARM + steps):
            for schedule, step in trained.items():
                losses[schedule].append(float(step(x)))
                found[schedule].append(nb.last_report())
    if losses[SCHEDULES[0]] != losses[SCHEDULES[1]]:
        raise SystemExit("the schedules did not end with the same losses")
    return {schedule: reports[WARM:] for schedule, reports in found.items()}


def compute_ideal_seconds(stages: int, micro_batches: int, schedule: str, line: str) -> float:
    """The simulator's prediction for stages with exactly these times."""
    works = [Work(PART, 2 * PART), *[Work(PART, PART, weights=PART)] * (stages - 1)]
    hops = make_uniform_hops(stages, seconds=0.0 if line == "free" else COMPUTE)
    return simulate(works, hops, micro_batches, name=schedule).seconds


def measure(stages: int, micro_batches: int, line: str, steps: int) -> dict[str, Any]:
    """One case."""
    reports = run_steps(stages, micro_batches, LINES[line], steps)
    rows = {schedule: _summarize_reports(own) for schedule, own in reports.items()}
    ideal = {schedule: compute_ideal_seconds(stages, micro_batches, schedule, line) for schedule in SCHEDULES}
    for schedule, row in rows.items():
        row["ideal_s"] = round(ideal[schedule], 4)
    eager, zero = (rows[schedule] for schedule in SCHEDULES)
    off = max(abs(row["off_simulator"]) for row in rows.values())
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "line": line,
        "schedules": rows,
        "faster": round(eager["step_s"] / zero["step_s"], 3),
        "simulated": round(ideal[SCHEDULES[0]] / ideal[SCHEDULES[1]], 3),
        "bar": BAR,
        "verdict": verdict(off, BAR),
    }


def _summarize_reports(reports: Sequence[nb.Report]) -> dict[str, Any]:
    step = statistics.median(report.step_seconds for report in reports)
    simulated = statistics.median(report.predicted_seconds or 0.0 for report in reports)
    return {
        "step_s": round(step, 4),
        "simulator_s": round(simulated, 4),
        "off_simulator": round(step / simulated - 1.0, 4),
    }


def format_table(results: list[dict[str, Any]]) -> list[list[object]]:
    """The rows of the README's table."""
    rows: list[list[object]] = [
        ["stages", "micro-batches", "line", *SCHEDULES, "faster by", "to the dot", "bar: off the simulator", ""]
    ]
    for row in results:
        steps = [f"{own['step_s']:.3f} s ({own['off_simulator']:+.1%})" for own in row["schedules"].values()]
        case = [row["stages"], row["micro_batches"], row["line"]]
        rows.append([*case, *steps, row["faster"], row["simulated"], f"≤ {row['bar']:.0%}", row["verdict"]])
    return rows


def main() -> None:
    """Measure all cases and write the result."""
    quick = parser(__doc__, "few steps of the smallest case; writes nothing").parse_args().quick
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(8)  # a waiting stage holds a thread
    cases = [(stages, many, line) for stages in (2, 4) for many in (4, 8) for line in LINES]
    here, results = describe_machine(), []
    for case in cases[:1] if quick else cases:
        results.append(measure(*case, 4 if quick else STEPS))
        print(results[-1], flush=True)
    if not quick:
        write(__file__, {"machine": here, "steps": STEPS, "part_s": PART, "results": results}, format_table(results))


if __name__ == "__main__":
    main()
