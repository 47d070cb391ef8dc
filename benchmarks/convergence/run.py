"""Steps of a small translator to a fixed loss, by the codec of its boundary; and the seconds on the line.

    python benchmarks/convergence/run.py                                  # all of it: an hour and more
    python benchmarks/convergence/run.py --codec none int4 --seed 1 2     # some of it
    python benchmarks/convergence/run.py --table                          # what there is so far
    python benchmarks/convergence/run.py --quick                          # fifty steps with and without a codec

Each (codec, seed) is a single-threaded process, two at a time. Each result is a line of results.jsonl at once: it can
be interrupted, and continued with the same command; to begin anew, delete that file. The table and the plot of
README.md are made from it.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from boundaries import CODECS, LABELS
from common import picture, read_finished_runs, write
from separate_processes import run_all, start_script

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
SEEDS = (1, 2, 3)
LOSSES = (0.5, 0.1)
LINE = 60e6
LIMIT = 3600.0
NOT_YET = 3

Run = dict[str, Any]


# ---------------------------------------------------------------------- running
def run_missing(wanted: Sequence[tuple[str, int]], path: Path, jobs: int, steps: Sequence[str] = ()) -> None:
    """Run what is missing, several at a time; `steps` limits a run."""
    done = {(each["codec"], each["seed"]) for each in read_finished_runs(path)}
    unknown: set[str] = set()

    def start(pair: tuple[str, int]) -> subprocess.Popen[str] | None:
        known = pair[0] not in unknown
        return start_script([HERE / "one.py", *pair, *steps], stderr=subprocess.PIPE) if known else None

    def handle_end(pair: tuple[str, int], process: subprocess.Popen[str]) -> None:
        if not record_result(pair, process, path):
            unknown.add(pair[0])

    run_all([pair for pair in wanted if pair not in done], start, handle_end, jobs=jobs, limit=LIMIT)


def record_result(pair: tuple[str, int], process: subprocess.Popen[str], path: Path) -> bool:
    """Write the result of a run; returns whether its codec can be run at all."""
    out, err = process.communicate()
    if process.returncode == 0:
        line = out.strip().splitlines()[-1]
        with path.open("a") as file:
            file.write(line + "\n")
        found = json.loads(line)
        last = found["curve"][-1]
        print(*pair, f"{found['steps']} steps, loss {last[2]}, {found['seconds']} s", flush=True)
    else:
        said = (err.strip().splitlines() or [""])[-1]
        print(*pair, f"failed ({process.returncode}): {said}", flush=True)
    return process.returncode != NOT_YET


# ---------------------------------------------------------------------- telling
def find_point_below(run: Run, loss: float) -> list[float] | None:
    """The position in a run's curve from which both its losses, of training and of validation, are below `loss`."""
    return next((point for point in run["curve"] if max(point[1:3]) <= loss), None)


def make_row(codec: str, runs: Sequence[Run], plain: Sequence[Run]) -> list[object]:
    """A line of the table."""
    own = [run for run in runs if run["codec"] == codec]
    cells: list[object] = [LABELS[codec], *compute_ratios(own)]
    for loss in LOSSES:
        cells += [format_steps(own, loss), compare_steps(own, plain, loss)]
    held = [8 * max(point[3:5]) / LINE for run in own if (point := find_point_below(run, LOSSES[-1]))]
    step = statistics.median(run["step_seconds"] for run in own)
    return [*cells, f"{statistics.mean(held):.0f}" if len(held) == len(own) else "", f"{1e3 * step:.0f}"]


def compute_ratios(runs: Sequence[Run]) -> list[str]:
    """The compression ratios in both directions, with headers."""
    last = [(run["curve"][-1], run["steps"] * run["raw_bytes"]) for run in runs]
    return [f"{statistics.mean(raw / point[way] for point, raw in last):.1f}" for way in (3, 4)]


def format_steps(runs: Sequence[Run], loss: float) -> str:
    """Steps to a loss, seed by seed."""
    points = [(run["seed"], find_point_below(run, loss), run["steps"]) for run in runs]
    return " ".join(f"{point[0]}" if point else f">{steps}" for _, point, steps in sorted(points, key=lambda x: x[0]))


def compare_steps(runs: Sequence[Run], plain: Sequence[Run], loss: float) -> str:
    """The mean number of steps relative to the same seeds without a codec, in per cent."""
    other = {run["seed"]: find_point_below(run, loss) for run in plain}
    pairs = [(find_point_below(run, loss), other.get(run["seed"])) for run in runs]
    if not pairs or any(own is None or reference is None for own, reference in pairs):
        return ""
    taken = sum(own[0] for own, _ in pairs if own) / sum(reference[0] for _, reference in pairs if reference)
    return f"{100 * (taken - 1):+.0f} %"


def make_table(runs: Sequence[Run]) -> list[list[object]]:
    """The table's head and lines."""
    head: list[object] = ["what crosses as", "fewer bytes there", "and back"]
    for loss in LOSSES:
        head += [f"steps to a loss of {loss}", "beside nothing"]
    head += [f"seconds of a line of {LINE / 1e6:.0f} Mbit/s to {LOSSES[-1]}", "ms of a core a step"]
    plain = [run for run in runs if run["codec"] == "none"]
    known = [codec for codec in CODECS if any(run["codec"] == codec for run in runs)]
    return [head, *(make_row(codec, runs, plain) for codec in known)]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot validation losses by step, a colour for each codec."""
    import matplotlib

    drawn = matplotlib.colormaps["turbo"]
    colors = {codec: drawn(place / len(CODECS)) for place, codec in enumerate(CODECS)}
    with picture(path, size=(9, 5)) as (axes,):
        for run in runs:
            steps, losses = zip(*((point[0], point[2]) for point in run["curve"]), strict=True)
            label = LABELS[run["codec"]] if run["seed"] == SEEDS[0] else None
            axes.plot(steps, losses, color=colors[run["codec"]], label=label, linewidth=1)
        axes.set(yscale="log", xlabel="step", ylabel="validation loss")


def main() -> int:
    """Run what is requested, and print the results so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--seed", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="fifty steps with and without a codec; writes nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all runs are ended
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.jsonl")
            run_missing([("none", 1), ("int4", 1)], results, options.jobs, ["50"])
            return int(len(read_finished_runs(results)) != 2)
    if not options.table:
        wanted = [(codec, seed) for seed, codec in product(options.seed, options.codec)]
        run_missing(wanted, options.results, options.jobs)
    runs = read_finished_runs(options.results)
    if not runs:
        return 1
    lines = make_table(runs)
    for line in lines:
        print(*line, sep=" | ")
    plot(runs, HERE / "curves.svg")
    about = [{key: value for key, value in run.items() if key != "curve"} for run in runs]
    write(__file__, {"machine": runs[0]["machine"], "runs": about, "table": lines}, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
