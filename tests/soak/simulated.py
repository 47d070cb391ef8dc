"""Many simulated runs with faults: `python -m tests.soak.simulated --cases 20000 [--seed 1]`.

First comes the grid: every failpoint, worker and action. Then random cases, whose numbers go up from the seed. A case
with violations prints the command that repeats it (`--case '...'`), and the exit code is 1.
"""

import argparse
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.simulation.case import generate_grid, make_random_case
from tests.simulation.simulator import Case, CaseResult, simulate

MOST_PRINTED = 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.simulated")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", help="run only this case, and show its result")
    options = parser.parse_args(arguments)
    if options.case:
        result = simulate(Case.parse(options.case))
        print(describe_result(result))
        return bool(result.wrong)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    cases = itertools.chain(generate_grid(), map(make_random_case, itertools.count(seed)))
    report = run(itertools.islice(cases, options.cases))
    print(json.dumps({"seed": seed, **report}))
    return bool(report["wrong"])


def run(cases: Iterable[Case]) -> dict[str, object]:
    """Run all cases; violations are printed at once."""
    counts: Counter[str] = Counter()
    began, used = time.monotonic(), time.process_time()
    for case in cases:
        result = simulate(case)
        counts["cases"] += 1
        counts["faulted" if result.applied_faults else "undisturbed"] += 1
        counts["completed" if result.is_complete else "stopped"] += 1
        if result.wrong:
            counts["wrong"] += 1
            if counts["wrong"] <= MOST_PRINTED:
                print(describe_failure(result), flush=True)
    seconds = round(time.monotonic() - began, 1)
    used = time.process_time() - used
    each = round(1e3 * used / max(1, counts["cases"]), 1)
    return {**counts, "wrong": counts["wrong"], "seconds": seconds, "cpu_ms_a_case": each}


def describe_failure(result: CaseResult) -> str:
    """The violations of a case, and the command that repeats it."""
    return f"{'; '.join(result.wrong)}\n  python -m tests.soak.simulated --case '{result.case}'"


def describe_result(result: CaseResult) -> str:
    """The complete result of a case."""
    lines = [f"{result.case}: {'; '.join(result.wrong) or 'as it must be'}, {result.seconds:.2f} s of its clock"]
    lines += [f"faults: {', '.join(map(str, result.applied_faults)) or 'none'}"]
    for worker, each in result.outcomes.items():
        end = (
            "ended well"
            if each.state is not None
            else f"killed at {each.killed_at}"
            if each.killed_at is not None
            else ""
        )
        lines.append(f"{worker}: {each.applied} steps, {end or f'stopped at {each.ended_at:.2f}: {each.error}'}")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.getLogger("whale_nebula").setLevel(logging.CRITICAL)
    sys.exit(main())
