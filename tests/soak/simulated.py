"""Many simulated runs with faults: `python -m tests.soak.simulated --cases 20000 [--seed 1]`.

First comes the grid: every failpoint, worker and action. Then random cases, whose numbers go up from the seed. A case
that must not be prints the line that runs it again (`--case '...'`), and the exit code is 1.
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

from tests.simulation.case import grid, random_case
from tests.simulation.simulator import Case, Found, simulate

SHOWN = 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.simulated")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", help="run this one alone, and show what became of it")
    given = parser.parse_args(arguments)
    if given.case:
        found = simulate(Case.parse(given.case))
        print(shown(found))
        return bool(found.wrong)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    cases = itertools.chain(grid(), map(random_case, itertools.count(seed)))
    report = run(itertools.islice(cases, given.cases))
    print(json.dumps({"seed": seed, **report}))
    return bool(report["wrong"])


def run(cases: Iterable[Case]) -> dict[str, object]:
    """Run them all; what is wrong is printed as it comes."""
    counts: Counter[str] = Counter()
    began, used = time.monotonic(), time.process_time()
    for case in cases:
        found = simulate(case)
        counts["cases"] += 1
        counts["struck" if found.struck else "untouched"] += 1
        counts["went on" if found.went_on else "stopped"] += 1
        if found.wrong:
            counts["wrong"] += 1
            if counts["wrong"] <= SHOWN:
                print(repro(found), flush=True)
    seconds = round(time.monotonic() - began, 1)
    used = time.process_time() - used
    each = round(1e3 * used / max(1, counts["cases"]), 1)
    return {**counts, "wrong": counts["wrong"], "seconds": seconds, "cpu_ms_a_case": each}


def repro(found: Found) -> str:
    """What is wrong with a case, and the line that runs it again."""
    return f"{'; '.join(found.wrong)}\n  python -m tests.soak.simulated --case '{found.case}'"


def shown(found: Found) -> str:
    """All that is known of a case."""
    lines = [f"{found.case}: {'; '.join(found.wrong) or 'as it must be'}, {found.seconds:.2f} s of its clock"]
    lines += [f"struck: {', '.join(map(str, found.struck)) or 'nothing'}"]
    for worker, each in found.outcomes.items():
        end = "ended well" if each.held is not None else f"killed at {each.killed}" if each.killed is not None else ""
        lines.append(f"{worker}: {each.applied} steps, {end or f'stopped at {each.at:.2f}: {each.error}'}")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.getLogger("whale_nebula").setLevel(logging.CRITICAL)
    sys.exit(main())
