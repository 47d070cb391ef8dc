"""The search for a plan: compared with the optimum on small cases, and its time and memory on large ones.

    python benchmarks/planner/search.py                  # both parts; writes search.json, search.png
    python benchmarks/planner/search.py --part times     # one of them; the other stays as it was measured
    python benchmarks/planner/search.py --quick          # few small cases of each; writes nothing

Small cases are drawn as in the tests (`tests/unit/planner/problems.py`): three to five blocks, two or three clusters,
unequal lines, sometimes too little memory, and in every second case four codecs for each boundary. Every plan of a case
is scored, and the result of the search is compared with the fastest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from common import describe_machine, picture, verdict, write  # noqa: E402

from tests.unit.planner.problems import draw_problem, find_best  # noqa: E402
from whale_nebula.planner.problem import Chain, ClusterCosts, Options, Problem  # noqa: E402
from whale_nebula.planner.search import search  # noqa: E402
from whale_nebula.schedule.lines import Line  # noqa: E402

CASES, EXCESS = 300, 0.02
SIZES = ((25, 16, 2), (50, 32, 4), (100, 64, 4), (200, 256, 8), (500, 1024, 8), (1000, 4096, 16))
BARS = {(100, 64, 4): 5.0, (1000, 4096, 16): 60.0}
MEMORY = 2**30
KINDS = ("plenty", "short")
HERE = Path(__file__).with_name("search.json")


# ---------------------------------------------------------------------- beside the best of all
def compare(seeds: range) -> dict[str, Any]:
    """The search compared with all plans, in the feasible cases."""
    rows, missed, since = [], [], time.process_time()
    for seed in seeds:
        problem = draw_problem(seed)
        found = search(problem).candidates
        better = find_best(problem, found[0].seconds if found else math.inf)  # None: no plan is better
        if better is not None and not found:
            missed.append(seed)
        elif found:
            best = better or found[0]
            rows.append({
                "seed": seed,
                "excess": found[0].seconds / best.seconds - 1.0,
                "schedule": best.schedule,
                "codecs": len(problem.chain.codec_choices),
                "stages": len(best.parts),
            })  # fmt: skip
    excess = [row["excess"] for row in rows]
    worst = max(excess)
    return {
        "cases": len(seeds),
        "where_a_plan_fits": len(rows),
        "not_found": missed,
        "worst": round(worst, 5),
        "worst_seed": max(rows, key=lambda row: row["excess"])["seed"],
        "mean": round(statistics.fmean(excess), 6),
        "exact": sum(each < 1e-9 for each in excess),
        "zero_bubble": sum(row["schedule"] == "zero-bubble" for row in rows),
        "with_codecs": sum(row["codecs"] > 1 for row in rows),
        "several_stages": sum(row["stages"] > 1 for row in rows),
        "cpu_s": round(time.process_time() - since, 1),
        "verdict": verdict(max(worst, math.inf if missed else 0.0), EXCESS),
    }


# ---------------------------------------------------------------------- large ones
def draw_large(blocks: int, workers: int, clusters: int, kind: str) -> Problem:
    """A random problem with unequal blocks and clusters; memory is plentiful, or a few times a worker's equal share."""
    draw = np.random.default_rng(1)
    seconds, weights = draw.uniform(0.2, 3, blocks) * 1e-4, draw.uniform(0.1, 2, blocks) * 1e6
    crossing = np.concatenate([[0], draw.uniform(0.5, 8, blocks - 1) * 1e3, [0]])
    chain = Chain(
        tuple(map(str, range(blocks))), weights, 2 * weights, weights, draw.uniform(0.02, 0.3, blocks) * 2.5e5,
        draw.uniform(0, 0.05, blocks) * 1e6, crossing, crossing, np.zeros(blocks + 1),
        np.ones(blocks + 1, bool), weights,
    )  # fmt: skip
    costs = []
    for number in range(clusters):
        forward = np.stack([draw.uniform(0, 2e-5, blocks), seconds / draw.choice([0.5, 1, 1, 2, 4])])
        share = float(weights.sum()) * 5 * clusters / workers * draw.uniform(1.5, 4)
        memory = share if kind == "short" else math.inf
        rest = seconds * 0.2, 5e-4, memory, Line(rate=1e9, delay=5e-5)
        costs.append(
            ClusterCosts(f"c{number}", workers // clusters, forward, 2 * forward, *rest, deferred_backward=forward)
        )
    lines = {
        (a, b): Line(rate=float(draw.choice([7.5e6, 15e6, 1e8])), delay=float(draw.choice([0.001, 0.01, 0.02])))
        for a in range(clusters) for b in range(clusters) if a != b
    }  # fmt: skip
    return Problem(chain, tuple(costs), 1024, lines, Options())


def measure_one(blocks: int, workers: int, clusters: int, kind: str) -> None:
    """Print the cost of one search in a separate process: seconds of its one core, and peak memory."""
    problem = draw_large(blocks, workers, clusters, kind)
    before, since = _most_bytes(), time.process_time()
    found = search(problem)
    row = {"seconds": time.process_time() - since, "bytes": _most_bytes(), "bytes_before": before}
    best = found.candidates[0]
    print(json.dumps({**row, "tried": found.tried, "stages": len(best.parts), "step_s": best.seconds}))


def _most_bytes() -> int:
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_times(sizes: tuple[tuple[int, int, int], ...]) -> list[dict[str, Any]]:
    """Each size with plentiful and with scarce memory."""
    rows = []
    for size in sizes:
        for kind in KINDS:
            command = [sys.executable, __file__, "--one", *map(str, size), kind]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            bar = BARS.get(size)
            fits = told["bytes"] < MEMORY
            said = "" if bar is None else verdict(told["seconds"] if fits else math.inf, bar)
            names = dict(zip(("blocks", "workers", "clusters"), size, strict=True))
            rows.append({**names, "memory": kind, **told, "bar": bar, "verdict": said})
            print(rows[-1], flush=True)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot seconds over blocks, both on logarithmic axes, and the bars."""
    with picture(path, size=(7, 4.5)) as (axes,):
        for kind, mark in zip(KINDS, ("o-", "s-"), strict=True):
            own = [row for row in rows if row["memory"] == kind]
            axes.plot([row["blocks"] for row in own], [row["seconds"] for row in own], mark, label=f"memory is {kind}")
        axes.plot([size[0] for size in BARS], list(BARS.values()), "_", color="black", markersize=18, label="bar")
        axes.set(xscale="log", yscale="log", xlabel="blocks × workers × clusters", ylabel="seconds of a search")
        axes.set_xticks([size[0] for size in SIZES], [" × ".join(map(str, size)) for size in SIZES], fontsize=7)
        axes.minorticks_off()


def table(result: dict[str, Any]) -> list[list[object]]:
    """The rows of the README's table."""
    rows: list[list[object]] = [["what", "measured", "bar", ""]]
    if small := result.get("small"):
        fits, worst = small["where_a_plan_fits"], small["worst"]
        what = f"worst of {fits} small cases, above the best of all plans"
        rows.append([what, f"{worst:.2%}", f"≤ {EXCESS:.0%}", small["verdict"]])
        rows.append(["their mean", f"{small['mean']:.3%}", "", f"{small['exact']} are the best itself"])
    for row in result.get("large", ()):
        what = f"{row['blocks']} blocks, {row['workers']} workers, {row['clusters']} clusters, memory {row['memory']}"
        bar = "" if row["bar"] is None else f"< {row['bar']:.0f} s, 1 GiB"
        rows.append([what, f"{row['seconds']:.1f} s, {row['bytes'] / 2**20:.0f} MiB", bar, row["verdict"]])
    return rows


def main() -> None:
    """Measure what is requested and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("cases", "times"), help="one of both")
    parser.add_argument("--quick", action="store_true", help="few small cases; writes nothing")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        *size, kind = given.one
        measure_one(*map(int, size), kind)
        return
    if given.quick:
        print(compare(range(6)), measure_times(SIZES[:1]))
        return
    made: dict[str, Any] = {"machine": describe_machine()}
    if given.part != "times":
        made["small"] = compare(range(CASES))
        print(made["small"], flush=True)
    if given.part != "cases":
        made["large"] = measure_times(SIZES)
        plot(made["large"], HERE.with_suffix(".png"))
    result = {**(json.loads(HERE.read_text("utf-8")) if HERE.exists() else {}), **made}
    write(__file__, result, table(result), "search")


if __name__ == "__main__":
    main()
