"""The computing time of each site in a step, predicted and measured, in seconds of its core.

    python benchmarks/planner/computing.py            # or one run, of which nothing is written: --quick

Runs are manual plans of `training.py` in two sites over tools/wan.py, each with its own core. Blocks and pieces of
steps are timed by the process's computing time, so other programs have little effect, and waits have none: this tests
the predicted costs of stages, tensors that cross, the update and the step itself, not their overlap with the line.
Needs root.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, verdict, write
from prediction import DELAY, SCRIPT, two_sites, use_own_cache

RUNS = (
    ("transformer", "0.5,4", "60mbit"),
    ("transformer", "0.5,8", "60mbit"),
    ("translator", "0.5,4", "120mbit"),
    ("convolutions", "0.5,4", "120mbit"),
    ("convolutions", "0.5,8", "120mbit"),
    ("classes", "0.3,4", "60mbit"),
)
STEPS, MOST = 16, 0.1


def measure(model: str, plan: str, rate: str) -> list[dict[str, Any]]:
    """The seconds of each site of a run: of its stage, of its update, and in total."""
    links = [{"between": list(two_sites.CLUSTERS), "rate": rate, "delay": DELAY}]
    words = [SCRIPT, model, plan, "--steps", str(STEPS), "--processor"]
    with use_own_cache(), tempfile.TemporaryDirectory() as folder:  # so that no run uses another's correction
        told, _ = two_sites.run((rate, DELAY), words, Path(folder), links=links, measure="90s")
    rows = []
    for each in sorted(told, key=lambda each: each["site"]):
        site, predicted, measured = each["site"], each["parts_predicted"], each["parts_measured"]
        own = {what.removeprefix(f"{site} "): s for what, s in predicted.items() if what.startswith(f"{site} ")}
        stage = sum(own.get(what, 0.0) for what in ("forward", "backward", "weights"))
        whole = sum(own.values())
        rows.append({
            "model": model, "plan": plan, "rate": rate, "site": site,
            "stage": (stage, each["compute_measured"][site]),
            "update": (own["update"], measured["once a step update"]),
            "whole": (whole, each["measured"]), "error": whole / each["measured"] - 1,
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure all runs and write the result."""
    quick = parser(__doc__, "one run; writes nothing").parse_args().quick
    rows = []
    for run in RUNS[-1:] if quick else RUNS:
        rows += measure(*run)
        print(*(f"{row['model']} {row['plan']} {row['site']} {row['error']:+.0%}" for row in rows[-2:]), flush=True)
    if quick:
        return
    mean = statistics.fmean(abs(row["error"]) for row in rows)
    table: list[list[object]] = [["model, plan, site", "stage", "update", "whole", "error of the whole"]]
    for row in rows:
        parts = (f"{1e3 * row[part][0]:.0f} / {1e3 * row[part][1]:.0f} ms" for part in ("stage", "update", "whole"))
        table.append([f"{row['model']} {row['plan']}, {row['site']}", *parts, f"{row['error']:+.0%}"])
    table.append(["mean of the errors", "", "", "", f"{mean:.0%}, {verdict(mean, MOST)} (≤ {MOST:.0%})"])
    write(
        __file__, {"machine": describe_machine(), "steps": STEPS, "mean_error": mean, "rows": rows}, table, "computing"
    )


if __name__ == "__main__":
    main()
