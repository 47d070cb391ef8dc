"""Fuzzing of frames: `python -m tests.fuzz.wire --seconds 60 [--frames 1000000] [--seed 1]`.

Every frame must be parsed or refused with RemoteProtocolError, in one piece and byte by byte, and no array above the
cap may be allocated. At the end the growth of resident memory is printed. A failure prints its seed and the frame, and
exits with 1.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

import psutil

from tests.fuzz.hostile import Hostile, fed, largest

WARM = 5_000
GROWTH_CAP = 50 << 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.wire")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--frames", type=int, default=1_000_000, help="stop after so many, too")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    report = run(seed, given.seconds, given.frames)
    print(json.dumps(report))
    return 0 if report["failure"] is None and report["grown_bytes"] < GROWTH_CAP else 1


def run(seed: int, seconds: float, frames: int) -> dict[str, object]:
    draw = random.Random(seed)
    attacks = [Hostile(draw), Hostile(draw, window=1 << 20), Hostile(draw, sealed=True)]
    makers = [hostile.frames() for hostile in attacks]
    counts: Counter[str] = Counter()
    failure = None
    began, first = time.monotonic(), 0
    while counts["frames"] < frames and time.monotonic() - began < seconds and failure is None:
        place = draw.randrange(len(attacks))
        failure = _attack(attacks[place], makers[place], counts, draw)
        if counts["frames"] == WARM:
            first = psutil.Process().memory_info().rss
    grown = psutil.Process().memory_info().rss - first if first else 0
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        **counts,
        "grown_bytes": grown,
        "largest_array": largest[0],
        "failure": failure,
    }


def _attack(hostile: Hostile, maker: Iterator[bytes], counts: Counter[str], draw: random.Random) -> str | None:
    """Prepare the victim and let it have frames until it refuses one."""
    talk = hostile.prepared()
    for _ in range(draw.randint(1, 4)):
        frame = next(maker)
        try:
            events, refused = fed(talk, iter([frame]))
        except Exception as error:
            return f"{type(error).__name__}: {error} for {frame.hex()}"
        counts["frames"] += 1
        counts["refused"] += refused
        counts["events"] += len(events)
        if refused:
            return None
    return None


if __name__ == "__main__":
    sys.exit(main())
