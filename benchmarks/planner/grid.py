"""The planner's plan compared with the best of a grid of manual plans: cuts, micro-batches and schedules.

    python benchmarks/planner/grid.py                                    all models over 60 and 120 Mbit/s
    python benchmarks/planner/grid.py --models classes --rates 60mbit    a part, which is added to the others
    python benchmarks/planner/grid.py --predict                          predictions alone; needs no quiet machine

All plans are predicted, by blocks that are timed by the processor time of one core. Then the planner's plan and those
that are predicted to take at most 1.2 times as long as the fastest are trained: each is a run of `training.py` in two
sites over tools/wan.py, each with its own core. Needs root.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, verdict, write
from prediction import DELAY, SCRIPT, Run, measure, train, use_own_cache

RESULT = Path(__file__).with_name("grid.json")
WITHIN, BAR = 1.2, 1.03
"""Plans are trained that are predicted to take so many times as long as the fastest; and the most that the planner's
plan may take of the best.
"""
MODELS, RATES = ("transformer", "translator", "convolutions", "classes"), ("60mbit", "120mbit")
SHARES, COUNTS, SCHEDULES = (0.25, 0.5, 0.75), (2, 4, 8), ("eager-1f1b", "gpipe")


def list_grid() -> Iterator[str]:
    """The manual plans: on one device, and cut in two at several shares of the computation."""
    yield "one"
    for share, count, schedule in itertools.product(SHARES, COUNTS, SCHEDULES):
        yield f"{share},{count},{schedule}"


def predict(model: str, rate: str) -> dict[str, Any]:
    """Predicted seconds of the planner's plan and of each manual plan, and the manual plans that are the planner's."""
    words = [SCRIPT, model, "planner", "--line", f"{rate},{DELAY}", "--processor", "--predict", *list_grid()]
    core = min(os.sched_getaffinity(0))
    (found,) = train(words, core)
    best = min(found["seconds"], key=lambda plan: found["seconds"][plan])
    return {
        "model": model, "rate": rate, "chosen": found["chosen"], "same": found["same"], "predicted_best": best,
        "share_measured": found["share_measured"],
        "predicted_ratio": found["planner"] / found["seconds"][best],
        "predicted": {"planner": found["planner"], **found["seconds"]},
    }  # fmt: skip


def compare(row: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train the planner's plan and the manual plans that may be as fast; returns the row with their seconds, and the
    ratio to the best, which is 1 if that is the planner's plan.
    """
    most = WITHIN * min(row["predicted"].values())
    plans = [plan for plan, seconds in row["predicted"].items() if seconds <= most]
    seconds = {}
    for plan in sorted(plans, key=lambda plan: row["predicted"][plan]):
        seconds[plan] = measure(Run(row["model"], plan, row["rate"]), steps)["measured"]
        print("   ", plan, f"predicted {row['predicted'][plan]:.3f}, measured {seconds[plan]:.3f}", flush=True)
    best = min((plan for plan in plans if plan != "planner"), key=lambda plan: seconds[plan], default="planner")
    ratio = 1.0 if best in row["same"] else seconds["planner"] / seconds[best]
    return {**row, "best": best, "ratio": ratio, "seconds": seconds}


def list_rows(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    """The rows of the README's table."""
    table: list[list[object]] = [
        ["model, link", "the planner's plan", "best of the grid", "predicted ratio", "the next best, predicted",
         "measured ratio", "bar", ""]
    ]  # fmt: skip
    for row in sorted(rows, key=lambda each: (MODELS.index(each["model"]), each["rate"])):
        others = [s for plan, s in row["predicted"].items() if plan not in ("planner", *row["same"])]
        after = f"{min(others) / row['predicted']['planner']:.2f}" if others else "-"
        ratio = row.get("ratio")
        measured, reached = ("not measured", "") if ratio is None else (f"{ratio:.3f}", verdict(ratio, BAR))
        best = row.get("best", row["predicted_best"])
        table.append([
            f"{row['model']}, {row['rate']}", row["chosen"].replace(" | ", ", "),
            f"{best}{' (the same)' * (best in row['same'])}",
            f"{row['predicted_ratio']:.3f}", after, measured, f"≤ {BAR}", reached,
        ])  # fmt: skip
    return table


def main() -> None:
    """Predict, measure, print and write."""
    made = parser(__doc__, "one model over one link, predictions alone; writes nothing")
    made.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    made.add_argument("--rates", nargs="+", default=RATES, choices=RATES)
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--predict", action="store_true", help="train nothing")
    a = made.parse_args()
    if a.quick:
        a.models, a.rates, a.predict = a.models[-1:], a.rates[:1], True
    kept = json.loads(RESULT.read_text("utf-8"))["rows"] if RESULT.exists() else []
    rows = {(each["model"], each["rate"]): each for each in kept}
    for model in a.models:
        with use_own_cache():
            for key in itertools.product([model], a.rates):
                row = predict(*key)
                rows[key] = {**rows.get(key, {}), **row} if a.predict else compare(row, a.steps)
                print(
                    *key, row["chosen"], f"predicted {row['predicted_ratio']:.3f}", rows[key].get("ratio"), flush=True
                )
                if not a.quick:
                    found = list(rows.values())
                    table = list_rows([row for row in found if "predicted" in row])
                    write(__file__, {"machine": describe_machine(), "steps": a.steps, "rows": found}, table, "grid")


if __name__ == "__main__":
    main()
