"""What a plan that was searched in advance saves at a start with another number of workers: the search.

    python benchmarks/recovery/advance.py            # writes advance.json
    python benchmarks/recovery/advance.py --quick    # the smallest size; writes nothing

Both ways are timed in turn, in one process, as seconds of one core: the search of a problem, and the lookup of what a
search has stored for it, with its digest and the check of each stored plan.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planner")]

from common import describe_machine, parser, write  # noqa: E402
from search import draw_large  # noqa: E402

from whale_nebula.planner import stored_plans  # noqa: E402
from whale_nebula.planner.search import search  # noqa: E402

SIZES, KINDS, PAIRS = ((25, 16, 2), (50, 32, 4), (100, 64, 4)), ("plenty", "short"), 5


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of one core that a call takes, and its result."""
    since = time.process_time()
    result = call()
    return time.process_time() - since, result


def measure_size(size: tuple[int, int, int], kind: str, pairs: int) -> dict[str, Any]:
    """Pairs of a search and a lookup, in turn."""
    problem = draw_large(*size, kind)
    stored_plans.search_in_advance([stored_plans.format_problem(problem)])
    searched, looked_up = [], []
    for _ in range(pairs):
        seconds, found = time_call(lambda: search(problem).candidates)
        searched.append(seconds)
        seconds, (stored, _) = time_call(lambda: stored_plans.find_stored_plan(problem))
        looked_up.append(seconds)
        if repr(stored) != repr(found):
            raise SystemExit(f"{size} {kind}: the stored plans are not those of the search")
    return {
        **dict(zip(("blocks", "workers", "clusters"), size, strict=True)), "memory": kind,
        "search_s": round(statistics.median(searched), 4), "lookup_s": round(statistics.median(looked_up), 4),
        "pairs": [[round(a, 4), round(b, 4)] for a, b in zip(searched, looked_up, strict=True)],
    }  # fmt: skip


def main() -> None:
    """Measure all sizes."""
    quick = parser(__doc__).parse_args().quick
    sizes = SIZES[:1] if quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        stored_plans.cache_path = lambda: Path(folder) / "measured.json"  # not the user's cache
        rows = [measure_size(size, kind, 2 if quick else PAIRS) for size in sizes for kind in KINDS]
    for row in rows:
        print(row, flush=True)
    if quick:
        return
    table = [["blocks", "workers", "memory", "search", "lookup of the stored plan"]]
    table += [
        [row["blocks"], row["workers"], row["memory"], f"{row['search_s']:.2f} s", f"{1e3 * row['lookup_s']:.0f} ms"]
        for row in rows
    ]
    write(__file__, {"machine": describe_machine(), "sizes": rows}, table, "advance")


if __name__ == "__main__":
    main()
