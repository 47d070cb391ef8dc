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

from tests.fuzz.hostile_frames import HostileFrames, feed_frames, largest_array

WARM = 5_000
GROWTH_CAP = 50 << 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.wire")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--frames", type=int, default=1_000_000, help="also stop after this many frames")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    report = run(seed, options.seconds, options.frames)
    print(json.dumps(report))
    return 0 if report["failure"] is None and report["grown_bytes"] < GROWTH_CAP else 1


def run(seed: int, seconds: float, frames: int) -> dict[str, object]:
    draw = random.Random(seed)
    sources = [HostileFrames(draw), HostileFrames(draw, window=1 << 20), HostileFrames(draw, sealed=True)]
    generators = [hostile.generate_frames() for hostile in sources]
    counts: Counter[str] = Counter()
    failure = None
    began, first_bytes = time.monotonic(), 0
    while counts["frames"] < frames and time.monotonic() - began < seconds and failure is None:
        place = draw.randrange(len(sources))
        failure = _attack_victim(sources[place], generators[place], counts, draw)
        if counts["frames"] == WARM:
            first_bytes = psutil.Process().memory_info().rss
    growth = psutil.Process().memory_info().rss - first_bytes if first_bytes else 0
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        **counts,
        "grown_bytes": growth,
        "largest_array": largest_array[0],
        "failure": failure,
    }


def _attack_victim(
    hostile: HostileFrames, generator: Iterator[bytes], counts: Counter[str], draw: random.Random
) -> str | None:
    """Prepare the victim and deliver frames until it refuses one."""
    conversation = hostile.prepare_victim()
    for _ in range(draw.randint(1, 4)):
        frame = next(generator)
        try:
            events, refused = feed_frames(conversation, iter([frame]))
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
