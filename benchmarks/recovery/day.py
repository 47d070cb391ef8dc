"""A simulated day of failures: the share of time for steps that count, by the interval of savings.

python benchmarks/recovery/day.py
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, write

from whale_nebula.runtime.checkpoint.level import choose_interval, estimate_between_failures

DAY, SEEDS = 86400.0, 12
STEP, RESTART, DETECTION = 0.5, 20.0, 1.0
"""Seconds: a step, a start with tracing, and until a death is noticed."""
COSTS = {"memory": 0.05, "disk": 2.0}
"""Seconds that a saving costs the steps."""
HOURS_BETWEEN_FAILURES = (1.0, 4.0, 12.0, 24.0)


def simulate(interval: float | None, cost: float, between: float, draw: random.Random) -> float:
    """The share of a day for new steps, with random failures `between` seconds apart on average. Without an `interval`
    the library's rule decides when to save.
    """
    failures = 0
    now = done = saved = 0.0
    failure = draw.expovariate(1 / between)
    last = 0.0
    while now < DAY:
        now += STEP
        done += STEP
        due = choose_interval(cost, estimate_between_failures(now, failures)) if interval is None else interval
        if now - last >= due:
            now += cost
            saved, last = done, now
        if now >= failure:
            done = saved
            failures += 1
            now += DETECTION + RESTART
            last = now
            failure = now + draw.expovariate(1 / between)
    return done / now


def main() -> int:
    """Simulate, print and write the result."""
    rows: list[list[Any]] = [
        ["saved to", "hours between failures", "by the rule", "every minute", "every 10 minutes", "every hour"]
    ]
    found = []
    for level, cost in COSTS.items():
        for hours in HOURS_BETWEEN_FAILURES:
            intervals = {"rule": None, "60": 60.0, "600": 600.0, "3600": 3600.0}
            shares = {
                name: statistics.mean(simulate(each, cost, hours * 3600, random.Random(seed)) for seed in range(SEEDS))
                for name, each in intervals.items()
            }
            found.append({"level": level, "hours": hours, **shares})
            rows.append([level, hours, *(f"{100 * share:.2f} %" for share in shares.values())])
            print(*rows[-1], sep="  ")
    write(__file__, {"machine": describe_machine(), "rows": found}, rows, part="day")
    return 0


if __name__ == "__main__":
    sys.exit(main())
