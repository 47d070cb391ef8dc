"""Forecasts of the simulator compared with papers' measurements: Whale's Figure 2, and Paddle's weak scaling.

    python benchmarks/planner/forecast.py            # two minutes; writes forecast.json, forecast.png
    python benchmarks/planner/forecast.py --quick    # the smallest numbers of devices; writes nothing

Nothing is run: devices are described as data (see README.md for all assumptions), and plans are scored by the cost
model and the simulator of `nb.auto_parallel`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from common import describe_machine, parser, picture, write  # noqa: E402

from whale_nebula.planner.problem import Candidate, Chain, ClusterCosts, Options, Part, Problem, Shape  # noqa: E402
from whale_nebula.planner.score import score  # noqa: E402
from whale_nebula.planner.search import search  # noqa: E402
from whale_nebula.schedule.lines import Line  # noqa: E402

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
ROWS = (1, 2, 4, 8)
"""Sequences that each device has in a step."""
LAYERS, WIDTH, HEADS, LENGTH, WORDS, MASKED = 24, 1024, 16, 128, 30522, 0.15
FLOPS, MEMORY = 6e12, 16 * 2.0**30
NETWORK, DELAY = Line(rate=35e9 / 8, delay=50e-6), 0.02
SLOW = Line(rate=60e6 / 8, delay=DELAY)
WHALE = (64, 2.32)
PADDLE = (1920, 0.917)


def describe_model() -> tuple[Chain, np.ndarray]:
    """BERT-Large: embeddings, 24 layers and the head with shared embeddings; and FLOPs of a forward by sequence."""
    layer, table = 12 * WIDTH**2 + 13 * WIDTH, WORDS * WIDTH
    numbers = np.array([table, *[layer] * LAYERS, WIDTH**2])
    each = 2.0 * LENGTH * (12 * WIDTH**2 + 2 * LENGTH * WIDTH)
    forward = np.array([0.0, *[each] * LAYERS, 2.0 * LENGTH * table * MASKED])
    crossing = np.array([0.0, *[4.0 * LENGTH * WIDTH] * (LAYERS + 1), 0.0])
    blocks = LAYERS + 2
    kept = 4.0 * LENGTH * (34 * WIDTH / 2 + 5 * HEADS * LENGTH / 2)
    held = np.array([4.0 * LENGTH * WIDTH, *[kept] * LAYERS, 4.0 * LENGTH * WORDS * MASKED])
    names = ("embeddings", *(f"layer{n}" for n in range(LAYERS)), "head")
    tied = np.array([0.0, *[4.0 * table] * (blocks - 1), 0.0])
    chain = Chain(
        names, 4.0 * numbers, 8.0 * numbers, 4.0 * numbers, held, np.zeros(blocks), crossing, crossing, tied,
        np.ones(blocks + 1, bool), 4.0 * numbers,
    )  # fmt: skip
    return chain, forward


def make_problem(devices: int, rows: int, halves: bool) -> Problem:
    """Devices in one cluster, or half of them at each end of the slow line."""
    chain, flops = describe_model()
    forward = np.stack([np.zeros(len(chain)), flops / FLOPS])
    update = chain.weights * 5 / 9e11
    count = 2 if halves else 1
    half = ClusterCosts(
        "", devices // count, forward, 2 * forward, update, 5e-4, MEMORY, NETWORK, deferred_backward=forward
    )
    costs = tuple(replace(half, name=f"half{n}") for n in range(count))
    lines = {(0, 1): SLOW, (1, 0): SLOW} if halves else {}
    return Problem(chain, costs, devices * rows, lines, Options(max_micro_batches=4096, recompute=False))


def predict_seconds(problem: Problem, *parts: Part, micro_batches: int) -> float:
    """Seconds of a step of a plan; infinite if memory is too small."""
    found = score(problem, Shape(parts, micro_batches))
    return found.seconds if isinstance(found, Candidate) else math.inf


def predict_whale_seconds(devices: int, rows: int) -> dict[str, float]:
    """Data parallelism, and three replicated stages as in Whale's Figure 3."""
    problem, blocks, copies = make_problem(devices, rows, False), LAYERS + 2, devices // 3
    between = replace(NETWORK, rate=NETWORK.rate * max(1, copies // 8))  # each server has its own
    lines = {(a, b): between for a in range(3) for b in range(3) if a != b}
    staged = replace(problem, options=replace(problem.options, schedules=("1f1b",)), lines=lines)
    staged = replace(staged, clusters=tuple(replace(problem.clusters[0], name=f"stage{n}") for n in range(3)))
    thirds = (Part(0, 0, 9, copies), Part(1, 9, 17, copies), Part(2, 17, blocks, copies))
    counts = [copies * power for power in (1, 2, 4, 8) if copies * power <= problem.rows]
    return {
        "data": predict_seconds(problem, Part(0, 0, blocks, devices), micro_batches=devices),
        "pipeline": min(predict_seconds(staged, *thirds, micro_batches=count) for count in counts),
    }


def predict_halves_seconds(devices: int, rows: int) -> dict[str, float]:
    """Two halves joined by the slow line: data parallelism over it, and the plan that the search finds."""
    problem = make_problem(devices, rows, True)
    whole = make_problem(devices, rows, False)
    size = float(whole.chain.gradients.sum())
    inside = predict_seconds(whole, Part(0, 0, LAYERS + 2, devices), micro_batches=devices)
    over = inside + 2 * (devices - 1) / devices * size / SLOW.rate + 2 * SLOW.delay
    free = search(replace(problem, options=replace(problem.options, max_micro_batches=1024))).candidates
    return {"data": over, "planned": free[0].seconds, "used": len({part.cluster for part in free[0].parts})}


def forecast(devices: tuple[int, ...], rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """All numbers of devices, and of sequences for each device."""
    found = []
    for each in rows:
        for count in devices:
            whale, halves = predict_whale_seconds(count, each), predict_halves_seconds(count, each) if each == 8 else {}
            found.append({"devices": count, "rows": each, **whale, **{f"halves_{k}": v for k, v in halves.items()}})
            print(found[-1], flush=True)
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot speed-up over data parallelism, and weak scaling, with the papers' points."""
    with picture(path, columns=2, size=(5.5, 4.5)) as (left, right):
        for each in ROWS:
            own = [row for row in rows if row["rows"] == each]
            counts = [row["devices"] for row in own]
            left.plot(counts, [row["data"] / row["pipeline"] for row in own], "o-", label=f"forecast, {each} a device")
            scaling = [own[0]["pipeline"] / row["pipeline"] for row in own]
            right.plot(counts, scaling, "o-", label=f"pipeline, {each} a device")
        own = [row for row in rows if "halves_planned" in row]
        counts = [row["devices"] for row in own]
        scaling = [own[0]["halves_planned"] / row["halves_planned"] for row in own]
        right.plot(counts, scaling, "s--", color="gray", label="two halves, planned, 8 a device")
        left.plot(*WHALE, "k*", markersize=14, label="Whale, Figure 2")
        right.plot(*PADDLE, "k*", markersize=14, label="Paddle, ERNIE 260B")
        left.set(xscale="log", xlabel="devices", ylabel="pipeline beside data parallelism", ylim=(0, None))
        right.set(xscale="log", xlabel="devices", ylabel="throughput a device, of that with 8", ylim=(0, 1.1))


def table(rows: list[dict[str, Any]]) -> list[list[object]]:
    """The rows of the README's table."""
    head = ["devices", *(f"pipeline ÷ data, {each} a device" for each in ROWS), "weak scaling, 8 a device"]
    lines: list[list[object]] = [[*head, "two halves: data", "two halves: planned, uses"]]
    by = {(row["devices"], row["rows"]): row for row in rows}
    for count in DEVICES:
        own = [by[count, each] for each in ROWS]
        halves = by[count, 8]
        ratios = [f"{row['data'] / row['pipeline']:.2f}" for row in own]
        scaling = by[DEVICES[0], 8]["pipeline"] / halves["pipeline"]
        used = "both" if halves["halves_used"] > 1 else "one"
        told = f"{halves['halves_data']:.0f} s", f"{halves['halves_planned']:.2f} s, {used}"
        lines.append([count, *ratios, f"{scaling:.1%}", *told])
    return lines


def main() -> None:
    """Forecast, and write the result."""
    if parser(__doc__, "the smallest numbers of devices; writes nothing").parse_args().quick:
        forecast(DEVICES[:1], (8,))
        return
    rows = forecast(DEVICES, ROWS)
    plot(rows, Path(__file__).with_name("forecast.png"))
    papers = {"whale_devices_and_speedup": WHALE, "paddle_devices_and_scaling": PADDLE}
    write(__file__, {"machine": describe_machine(), "rows": rows, "papers": papers}, table(rows), "forecast")


if __name__ == "__main__":
    main()
