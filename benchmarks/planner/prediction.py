"""Predicted seconds of a step compared with measured ones: models, the planner's and manual plans, and lines.

    python benchmarks/planner/prediction.py                  all runs; or some by --runs 0,3,5, which are added
    python benchmarks/planner/prediction.py --quick          one run, nothing is written

A run is `training.py` in two sites over tools/wan.py, each with its own core, or in one process with an emulated line,
or on one device. Needs root for the sites. Each run measures its own blocks, in a separate folder, because the speed of
a machine may change over minutes. A prediction uses nothing that was learned from steps.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import two_sites  # noqa: E402
from common import describe_machine, parser  # noqa: E402

RESULT = HERE / "prediction.json"
SCRIPT = str(HERE / "training.py")


class Run(NamedTuple):
    """A model, a plan, a line, and where it runs."""

    model: str
    plan: str
    rate: str = "free"
    where: str = "sites"


RUNS = (
    Run("transformer", "one", where="process"),
    Run("transformer", "planner", "60mbit"),
    Run("transformer", "0.5,4", "60mbit"),
    Run("transformer", "0.3,8", "120mbit"),
    Run("transformer", "0.5,4", "60mbit", "process"),
    Run("translator", "one", where="process"),
    Run("translator", "planner", "60mbit"),
    Run("translator", "0.5,4", "120mbit"),
    Run("translator", "0.5,8", "free"),
    Run("translator", "0.5,4", "120mbit", "process"),
    Run("convolutions", "one", where="process"),
    Run("convolutions", "planner", "60mbit"),
    Run("convolutions", "0.5,8", "120mbit"),
    Run("convolutions", "0.5,4", "60mbit", "process"),
    Run("classes", "one", where="process"),
    Run("classes", "planner", "120mbit"),
    Run("classes", "0.3,4", "60mbit"),
    Run("classes", "0.3,4", "free"),
)
DELAY = "5ms"


def train(words: Sequence[str], core: int | None = None) -> list[dict[str, Any]]:
    """The output of the processes of a run; on one `core` if it is given."""
    pinned = () if core is None else ("taskset", "-c", str(core))
    done = subprocess.run([*pinned, sys.executable, *words], capture_output=True, text=True, check=False)
    lines = [each[each.index('{"site"') :] for each in done.stdout.splitlines() if '{"site"' in each]
    if done.returncode or not lines:
        raise SystemExit(f"{words} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(each) for each in lines]


@contextlib.contextmanager
def use_own_cache() -> Iterator[None]:
    """A temporary folder for the measurements of blocks."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield


def measure(run: Run, steps: int) -> dict[str, Any]:
    """Train `steps` steps; returns the report of the last site to end a step, and the share of the machine's time that
    `others` used meanwhile.
    """
    busy = _count_busy()
    (Path(os.environ["XDG_CACHE_HOME"]) / "whale_nebula" / "slowness.json").unlink(missing_ok=True)
    words = [SCRIPT, run.model, run.plan, "--steps", str(steps)]
    if run.where == "process":
        line = "free" if run.rate == "free" else f"{run.rate},{DELAY}"
        told = train([*words, "--line", line])
    else:
        line = two_sites.FREE if run.rate == "free" else (run.rate, DELAY)
        given = {"links": [{"between": list(two_sites.CLUSTERS), "rate": line[0], "delay": line[1]}]}
        with tempfile.TemporaryDirectory() as folder:
            told, _ = two_sites.run(line, words, Path(folder), **(given if run.rate != "free" else {}))
    (whole, own, since), (cores, used, now) = busy, _count_busy()
    others = (cores - whole - (used - own)) / ((now - since) * (os.cpu_count() or 1))
    last = max(told, key=lambda each: each["measured"])
    error = last["predicted"] / last["measured"] - 1
    return {**run._asdict(), **last, "error": error, "others": round(max(others, 0.0), 3), "sites": told}


def _count_busy() -> tuple[float, float, float]:
    """Seconds that all cores have computed, those of this process's ended children, and the time."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = user + nice + system + sum(rest)
    return ticks / os.sysconf("SC_CLK_TCK"), own.ru_utime + own.ru_stime, time.monotonic()


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean error, and the share of pairs of the same model differing by more than a tenth whose order is predicted."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if a["model"] == b["model"] and max(a["measured"], b["measured"]) > 1.1 * min(a["measured"], b["measured"])
    ]
    right = sum((a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in pairs)
    found: dict[str, Any] = {"pairs": len(pairs), "pairs_right": right}
    for where in ("sites", "process"):
        own = [abs(row["error"]) for row in rows if row["where"] == where]
        found[f"mean_error_{where}"] = round(sum(own) / len(own), 4) if own else None
    found["mean_error"] = round(sum(abs(row["error"]) for row in rows) / len(rows), 4)
    return found


def main() -> int:
    """Measure, print and write."""
    made = parser(__doc__)
    made.add_argument("--runs", default=",".join(map(str, range(len(RUNS)))))
    made.add_argument("--steps", type=int, default=16)
    a = made.parse_args()
    if a.quick:
        with use_own_cache():
            print(measure(RUNS[-1], 6))
    else:
        measure_all([RUNS[int(number)] for number in a.runs.split(",")], a.steps)
    return 0


def measure_all(runs: Sequence[Run], steps: int) -> None:
    """Measure these runs, and add them to the result."""
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    rows = {Run(*(row[key] for key in Run._fields)): row for row in kept["rows"]}
    for run in runs:
        try:
            with use_own_cache():
                rows[run] = measure(run, steps)
        except SystemExit as failure:
            print(run, failure, flush=True)
            continue
        row = rows[run]
        print(*run, f"{row['predicted']:.3f} {row['measured']:.3f} {row['error']:+.0%}", flush=True)
        ordered = [rows[each] for each in RUNS if each in rows]
        result = {"machine": describe_machine(), "steps": steps, **summarise(ordered), "rows": ordered}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(summarise([rows[each] for each in RUNS if each in rows]))


if __name__ == "__main__":
    raise SystemExit(main())
