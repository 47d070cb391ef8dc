"""A generator that feeds a discriminator over 120 Mbit/s and 20 ms: its speed relative to a free line.

python benchmarks/one_way/run.py             # needs root and /dev/net/tun
python benchmarks/one_way/run.py --quick     # few short steps, once; writes nothing
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, verdict, write
from two_sites import FREE, run

BAR, NEBULA_I = 0.97, 0.85
QUICK = ["--rows", "4", "--width", "64", "--pairs", "2"]


def main() -> int:
    """Run with alternating lines, then the median of neighbouring pairs."""
    made = parser(__doc__, "few short steps, once; writes nothing")
    made.add_argument("--rounds", type=int, default=2)
    chosen = made.parse_args()
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        follow = Path(folder) / "line"
        script = [str(Path(__file__).with_name("program.py")), "--line", str(follow), *(QUICK if chosen.quick else [])]
        for _ in range(1 if chosen.quick else chosen.rounds):
            told, crossed = run(FREE, script, Path(folder), follow=follow)
            seconds = max((each["seconds"] for each in told), key=lambda each: sum(each["free"]))
            pairs += zip(seconds["free"], seconds["slow"], strict=True)
            print(*((round(a, 3), round(b, 3)) for a, b in pairs), told[0]["losses"], crossed, flush=True)
    free, slow = (statistics.median(each) for each in zip(*pairs, strict=True))
    shares = sorted(free / slow for free, slow in pairs)
    share = statistics.median(shares)
    row = {"free line": round(free, 3), "120 Mbit/s, 20 ms": round(slow, 3), "share": round(share, 3)}
    row["of all pairs"] = f"{shares[0]:.3f} to {shares[-1]:.3f}"
    row["verdict"] = verdict(share, BAR, least=True)
    print(row)
    if not chosen.quick:
        result = {"machine": describe_machine(), "bar": BAR, "nebula_i": NEBULA_I, "pairs": pairs, "row": row}
        write(__file__, result, [list(row), list(row.values())])
    return int(row["verdict"] == "missed" and not chosen.quick)


if __name__ == "__main__":
    sys.exit(main())
