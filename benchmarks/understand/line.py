"""A step of a BERT cut in two, at the base model's width, over 60 Mbit/s and 20 ms and over a free line.

python benchmarks/understand/line.py             # needs root and /dev/net/tun
python benchmarks/understand/line.py --quick     # two steps each; writes nothing
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, write
from two_sites import FREE, run

SLOW = ("60mbit", "20ms")
WHOLE = 32 * 28 * 768 * 4  # bytes of the boundary in float32


def main() -> None:
    """Run both lines, with all contenders in the same processes."""
    quick = parser(__doc__, "two steps each; writes nothing").parse_args().quick
    script = [str(Path(__file__).with_name("program.py")), *(["--steps", "2"] if quick else [])]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for line in (FREE, SLOW):
            told, _ = run(line, script, Path(folder))
            found[line] = max((each["found"] for each in told), key=lambda each: each["whole"]["seconds"])
    rows: list[list[object]] = [["what crosses", "fewer bytes there, back", "s a step, free line", "60 Mbit/s, 20 ms"]]
    for name, free in found[FREE].items():
        fewer = ", ".join(f"{WHOLE / sent:.0f}" for sent in free["payload"].values())
        rows.append([name, fewer, *(round(found[line][name]["seconds"], 3) for line in (FREE, SLOW))])
    for row in rows:
        print(*row, sep=" | ")
    if not quick:
        result = {"machine": describe_machine(), "found": {" ".join(line): each for line, each in found.items()}}
        write(__file__, result, rows, "line")


if __name__ == "__main__":
    main()
