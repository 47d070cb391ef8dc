"""A step over a slow line without security, with mutual TLS, and sealed through two gateways with audit logs.

python benchmarks/security/run.py            # needs root and /dev/net/tun
python benchmarks/security/run.py --quick    # a small model, once; writes nothing
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, verdict, write
from two_sites import Line, run

SLOW: Line = ("60mbit", "20ms")
BAR = 1.05
PROGRAM = Path(__file__).resolve().parents[1] / "wan_pipeline" / "ours.py"
SHAPE = {"rows": 32, "length": 64, "vocabulary": 4000, "width": 512, "heads": 8, "blocks": 4, "micro-batches": 8}
SMALL = {**SHAPE, "rows": 8, "width": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "insecure": {"security": {"insecure": True}},
    "mutual TLS": {},
    "TLS, gateways, sealed, audited": {"gateways": True},
}


def make_command(shape: dict[str, int], steps: int) -> list[str]:
    """The program with its sizes."""
    return [
        str(PROGRAM),
        *(word for name, size in {**shape, "steps": steps}.items() for word in (f"--{name}", str(size))),
    ]


def main() -> int:
    """Run all variants alternately, then take the medians."""
    options = parser(__doc__, "a small model, once; writes nothing")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    command = make_command(SMALL, 6) if args.quick else make_command(SHAPE, 12)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(1 if args.quick else args.rounds):
        for name, config in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                reports, crossed = run(SLOW, command, Path(folder), **config)
            seconds[name].append(max(each["median"] for each in reports))
            print(name, round(seconds[name][-1], 3), crossed, flush=True)
    plain = statistics.median(seconds["insecure"])
    rows = []
    for name, times in seconds.items():
        ratio = statistics.median(times) / plain
        rows.append([name, round(statistics.median(times), 3), round(ratio, 3), verdict(ratio, BAR)])
        print(*rows[-1])
    if not args.quick:
        result = {"machine": describe_machine(), "line": SLOW, "rounds": seconds, "bar": BAR}
        write(__file__, result, [["", "seconds a step", "of insecure", "verdict"], *rows])
    return int(any(row[-1] == "missed" for row in rows) and not args.quick)


if __name__ == "__main__":
    sys.exit(main())
