"""A generator feeds a discriminator over a line of 120 Mbit/s and 20 ms: its speed as a share of that over a free line.

    python benchmarks/one_way/run.py             # needs root and /dev/net/tun
    python benchmarks/one_way/run.py --quick     # few short steps, once; writes nothing
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import machine, verdict, write
from two_sites import FREE, Line, run

SLOW: Line = ("120mbit", "20ms")
BAR, NEBULA_I = 0.97, 0.85


def main() -> int:
    """Both lines by turns, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short steps, once; writes nothing")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    size = ["--rows", "4", "--width", "64"] if chosen.quick else []
    script = [str(Path(__file__).with_name("program.py")), *size]
    kept: dict[Line, list[float]] = {FREE: [], SLOW: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 if chosen.quick else chosen.rounds):
            for line, times in kept.items():
                told, crossed = run(line, script, Path(folder))
                times.append(max(each["seconds"] for each in told))
                print(*line, round(times[-1], 3), told[0]["losses"], told[0]["links"], crossed, flush=True)
    free, slow = (statistics.median(times) for times in kept.values())
    row = {"free line": round(free, 3), "120 Mbit/s, 20 ms": round(slow, 3), "share": round(free / slow, 3)}
    row["verdict"] = verdict(free / slow, BAR, least=True)
    print(row)
    if not chosen.quick:
        result = {"machine": machine(), "bar": BAR, "nebula_i": NEBULA_I, "rounds": list(kept.values()), "row": row}
        write(__file__, result, [list(row), list(row.values())])
    return int(row["verdict"] == "missed" and not chosen.quick)


if __name__ == "__main__":
    sys.exit(main())
