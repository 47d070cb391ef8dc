"""The transformer of wan_pipeline over 60 Mbit/s and 20 ms, by codec.

    python benchmarks/wan_codec/run.py           # needs root and /dev/net/tun
    python benchmarks/wan_codec/run.py --quick   # few steps, once; writes nothing

Every codec runs over the slow line and, to measure its own computing, over a free one, alternating in one run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import verdict
from two_sites import FREE, Line, run, run_benchmark

BENCHMARKS = Path(__file__).resolve().parents[1]
SHAPE = {"rows": 32, "length": 64, "vocabulary": 4000, "width": 512, "heads": 8, "blocks": 4, "micro_batches": 8}
SLOW: Line = ("60mbit", "20ms")
SCRIPT = BENCHMARKS / "wan_pipeline" / "ours.py"
BAR = 1.10


class Variant(NamedTuple):
    """A row's name, and its options of nb.compress."""

    name: str
    codec: str
    backward: str


VARIANTS = (
    Variant("none", "none", "none"),
    Variant("int8 both ways", "int8", "int8"),
    Variant("int4 both ways", "int4", "int4"),
    Variant("rank H/8 + int8", "rank(64) >> int8", "int8"),
    Variant("auto", "auto", "default"),
)


def run_step(way: Variant, line: Line, steps: int, folder: Path) -> dict[str, Any]:
    """One run: seconds of a step, and the bytes of its links."""
    shape = {**SHAPE, "steps": steps, "codec": way.codec, "backward": way.backward}
    words = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    (one, other), _ = run(line, [str(SCRIPT), *words], folder)
    if one["weights"] != other["weights"]:
        raise SystemExit(f"the sites ended with different weights: {way.name}")
    links = {**one["links"], **other["links"]}
    return {"seconds": max(one["median"], other["median"]), "links": links, "codecs": one["codecs"] | other["codecs"]}


def measure(steps: int, rounds: int) -> list[dict[str, Any]]:
    """All codecs over both lines, alternating."""
    kept: dict[tuple[Variant, Line], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            for way in VARIANTS:
                for line in (FREE, SLOW):
                    found = run_step(way, line, steps, Path(name))
                    kept.setdefault((way, line), []).append(found)
                    print(way.name, *line, round(found["seconds"], 3), found["links"], found["codecs"], flush=True)
    middle = {key: statistics.median(each["seconds"] for each in found) for key, found in kept.items()}
    return [_make_row(way, middle, kept[way, SLOW][-1]["links"]) for way in VARIANTS]


def _make_row(way: Variant, middle: dict[tuple[Variant, Line], float], links: dict[str, int]) -> dict[str, Any]:
    free, slow = middle[VARIANTS[0], FREE], middle[way, SLOW]
    own = middle[way, FREE] - free
    there, back = links.get("gpu->npu", 0), links.get("npu->gpu", 0)
    row = {"codec": way.name, "step": round(slow, 3), "of the free step": round(slow / free, 3)}
    row |= {"MB there": round(there / 1e6, 3), "MB back": round(back / 1e6, 3), "codec's own seconds": round(own, 3)}
    return row | ({"verdict": verdict(slow / free, BAR)} if way.codec == "int4" else {})


def main() -> int:
    """Measure, print and write the result."""
    return run_benchmark(
        __file__,
        __doc__,
        whole=measure,
        quick=lambda: measure(5, 1),
        quick_help="few steps, once",
        steps=14,
        shape=SHAPE,
        keys=("codec", "step", "of the free step", "MB there", "MB back", "codec's own seconds", "verdict"),
    )


if __name__ == "__main__":
    sys.exit(main())
