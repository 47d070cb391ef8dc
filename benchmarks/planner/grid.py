"""The planner's plan compared with the best of a grid of manual plans, both trained: cuts, micro-batches and schedules.

    python benchmarks/planner/grid.py                                    all models over 60 and 120 Mbit/s; hours
    python benchmarks/planner/grid.py --models classes --rates 60mbit    a part, which is added to the others

Each plan is a run of `training.py` in two sites over tools/wan.py, each with its own core. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prediction import Run, describe_machine, measure, use_own_cache

RESULT = Path(__file__).with_name("grid.json")
MODELS, RATES = ("transformer", "translator", "convolutions", "classes"), ("60mbit", "120mbit")
SHARES, COUNTS, SCHEDULES = (0.25, 0.5, 0.75), (2, 4, 8), ("eager-1f1b", "gpipe")


def list_grid() -> Iterator[str]:
    """The manual plans: on one device, and cut in two at several shares of the computation."""
    yield "one"
    for share, count, schedule in itertools.product(SHARES, COUNTS, SCHEDULES):
        yield f"{share},{count},{schedule}"


def compare(model: str, rate: str, steps: int) -> dict[str, Any]:
    """Seconds of a step by plan, and those of the planner's relative to the best."""
    seconds = {plan: measure(Run(model, plan, rate), steps)["measured"] for plan in ("planner", *list_grid())}
    best = min((plan for plan in seconds if plan != "planner"), key=lambda plan: seconds[plan])
    return {"model": model, "rate": rate, "best": best, "ratio": seconds["planner"] / seconds[best], "seconds": seconds}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rates", nargs="+", default=RATES, choices=RATES)
    parser.add_argument("--steps", type=int, default=12)
    a = parser.parse_args()
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for model, rate in itertools.product(a.models, a.rates):
        with use_own_cache():
            found = compare(model, rate, a.steps)
        print(model, rate, f"{found['ratio']:.3f} of {found['best']}", flush=True)
        rows = [each for each in rows if (each["model"], each["rate"]) != (model, rate)] + [found]
        RESULT.write_text(
            json.dumps({"machine": describe_machine(), "steps": a.steps, "rows": rows}, indent=1) + "\n", "utf-8"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
