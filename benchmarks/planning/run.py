"""The growth of planning time with the number of ops.

    python benchmarks/planning/run.py            # everything; writes result.json and planning.png
    python benchmarks/planning/run.py --quick    # the two smallest, to see that it runs; writes nothing

For each size a step is traced once by `tf.function` and once captured and planned. The cost of planning is the time of
capture and planning beyond the trace; if it grows faster than the ops, the exponent is above one.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from common import describe_machine, parser, picture, verdict, write

import whale_nebula as nb

WIDTH, STAGES = 8, 4
MICRO_BATCHES = (1, 4)
LAYERS = (16, 44, 120, 332, 760)
BAR = 1.1
"""The exponent of a power of the ops; what is linear has 1, and a measurement is not exact."""


class Deep(tf.Module):
    """A deep residual network on bare variables, with a gradient and an update: some 50 ops a layer."""

    def __init__(self, layers: int, scoped: bool) -> None:
        super().__init__()
        self.weights = [tf.Variable(tf.eye(WIDTH), name=f"w{n}") for n in range(layers)]
        self.slots = [tf.Variable(tf.zeros([WIDTH, WIDTH]), name=f"m{n}") for n in range(layers)]
        self.scoped = scoped

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """One step of momentum."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self._forward(x) - y) ** 2)
        for weight, slot, gradient in zip(self.weights, self.slots, tape.gradient(loss, self.weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.01 * slot)
        return loss

    def _forward(self, hidden: tf.Tensor) -> tf.Tensor:
        each = len(self.weights) // STAGES
        for stage in range(STAGES):
            mine = self.weights[stage * each : (stage + 1) * each]
            if not self.scoped:
                hidden = _apply_layers(hidden, mine)
                continue
            with nb.stage(cluster=f"c{stage}"):
                hidden = _apply_layers(hidden, mine)
        return hidden


def _apply_layers(hidden: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    for weight in weights:
        inner = tf.nn.gelu(hidden @ weight)
        hidden = hidden + inner * tf.nn.sigmoid(inner)
    return hidden


def measure(layers: int, micro_batch: int) -> dict[str, Any]:
    """Seconds of a trace alone and of a plan, and the number of ops."""
    batch = (tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, WIDTH]))
    plain, own = Deep(layers, scoped=False), Deep(layers, scoped=True)

    @nb.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with nb.cluster(), nb.pipeline(micro_batch):
            return own.step(x, y)

    traced, concrete = _time_call(lambda: tf.function(plain.step, autograph=False).get_concrete_function(*batch))
    planned, plan = _time_call(lambda: nb.plan(step, *batch))
    ops = len(concrete.graph.get_operations())
    return {
        "layers": layers,
        "micro_batch": micro_batch,
        "ops": ops,
        "stages": len(plan.stages),
        "trace_s": round(traced, 3),
        "plan_s": round(planned, 3),
        "ratio": round(planned / traced, 2),
    }


def _time_call(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process's computing, independent of other programs."""
    gc.collect()
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def fit_exponent(rows: list[dict[str, Any]], seconds: Callable[[dict[str, Any]], float]) -> float:
    """The slope of log(seconds) over log(ops), by least squares."""
    x = [math.log(row["ops"]) for row in rows]
    return float(np.polyfit(x, [math.log(max(1e-3, seconds(row))) for row in rows], 1)[0])


def fit_exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each number of micro-batches: the growth of the trace alone, and of trace and plan together."""
    found = []
    for micro_batch in MICRO_BATCHES:
        own = [row for row in rows if row["micro_batch"] == micro_batch]
        whole = fit_exponent(own, lambda row: row["plan_s"])
        found.append({
            "micro_batch": micro_batch,
            "trace": round(fit_exponent(own, lambda row: row["trace_s"]), 3),
            "trace_to_plan": round(whole, 3),
            "bar": BAR,
            "verdict": verdict(whole, BAR),
        })  # fmt: skip
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot seconds over ops, both on logarithmic axes, with a straight line for comparison."""
    first = [row for row in rows if row["micro_batch"] == 1]
    ops, line = [r["ops"] for r in first], [first[-1]["plan_s"] * r["ops"] / first[-1]["ops"] for r in first]
    with picture(path, size=(7, 4.5)) as (axes,):
        for number in MICRO_BATCHES:
            own = [row for row in rows if row["micro_batch"] == number]
            axes.plot([r["ops"] for r in own], [r["plan_s"] for r in own], "o-", label=f"plan, micro_batch={number}")
        axes.plot(ops, [r["trace_s"] for r in first], "s--", color="gray", label="tf.function alone")
        axes.plot(ops, line, ":", color="black", label="linear")
        axes.set(xscale="log", yscale="log", xlabel="ops of the uncut step", ylabel="seconds of computing")


def main() -> int:
    """Measure, print and write the result."""
    quick = parser(__doc__, "the two smallest sizes; writes nothing").parse_args().quick
    measure(4, 1)  # warm-up: the first trace of a process has one-time costs
    rows = []
    for micro_batch in MICRO_BATCHES:
        for layers in LAYERS[:2] if quick else LAYERS:
            rows.append(measure(layers, micro_batch))
            print(rows[-1], flush=True)
    found = fit_exponents(rows)
    for row in found:
        print(row)
    if not quick:
        keys = ("ops", "micro_batch", "trace_s", "plan_s", "ratio")
        plot(rows, Path(__file__).with_name("planning.png"))
        write(
            __file__,
            {"machine": describe_machine(), "rows": rows, "exponents": found},
            [keys, *_format_table(rows, keys)],
        )
    return 0


def _format_table(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[list[object]]:
    return [[row[key] for key in keys] for row in rows]


if __name__ == "__main__":
    sys.exit(main())
