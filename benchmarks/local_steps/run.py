"""Two clusters that synchronise every hundred steps: their time on the line, and the effect on the loss.

python benchmarks/local_steps/run.py            # root (it makes hosts of its own); 16 minutes
python benchmarks/local_steps/run.py --quick    # a few steps over the line, a minute; writes nothing
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import describe_machine, parser, verdict, write  # noqa: E402
from two_sites import FREE, run  # noqa: E402

LINE = ("60mbit", "20ms")
EVERY, STEPS, RUNS, SEEDS = 100, 825, 2, (1, 2, 3)
LEARNED = 400
LOST, NEAR = 0.05, 1.0
DEADLINE = 3600


def run_timed(folder: Path) -> dict[str, Any]:
    """One run in which the line is slow and free alternately; seconds of both sites, by period."""
    follow = folder / "line"
    lines = [" ".join(each) for each in (LINE, FREE)]
    words = ["--every", str(EVERY), "--steps", str(STEPS), "--follow", str(follow), "--lines", *lines]
    told, _ = run(FREE, [str(HERE / "site.py"), *words], folder, follow=follow)
    slow, free = ([sum(both) for both in zip(*(each["blocks"][n] for each in told), strict=True)] for n in (0, 1))
    met = told[0]["met"]
    size = statistics.mean(sum(each["bytes"].values()) for each in told) / met
    print(told, flush=True)
    return {"slow": slow, "free": free, "waited": [each["waited"] for each in told], "met": met, "bytes": size}


def train_apart(seed: int, outer: str, folder: Path) -> float:
    """The held-out loss of two sites with local SGD."""
    words = ["--every", str(EVERY), "--steps", str(LEARNED), "--seed", str(seed), "--outer", outer, "--loss"]
    told, _ = run(FREE, [str(HERE / "site.py"), *words], folder)
    losses: set[float] = {each["loss"] for each in told}
    print(outer, seed, losses, flush=True)
    [loss] = losses  # of the same weights
    return loss


def train_together(seed: int) -> float:
    """The held-out loss of synchronous training."""
    command = [sys.executable, str(HERE / "learn.py"), "--seed", str(seed), "--steps", str(LEARNED)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False)
    if ended.returncode:
        raise SystemExit(f"{command} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    loss: float = json.loads(ended.stdout.splitlines()[-1])["loss"]
    print("together", seed, loss, flush=True)
    return loss


OUTERS = ("average",)


def run_all() -> int:
    """Run the complete benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = [run_timed(Path(folder)) for _ in range(RUNS)]
        losses = {outer: [train_apart(seed, outer, Path(folder)) for seed in SEEDS] for outer in OUTERS}
    losses["together"] = [train_together(seed) for seed in SEEDS]
    rows = [*_list_time_rows(seconds), *_list_loss_rows(losses)]
    result = {"machine": describe_machine(), "line": LINE, "every": EVERY, "seconds": seconds, "losses": losses}
    write(__file__, result, [("what", "measured", "beside", "at most", ""), *rows])
    return int(any(row[-1] == "missed" for row in rows))


def _list_time_rows(runs: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    slow, free = (sum(sum(each[kind]) for each in runs) for kind in ("slow", "free"))
    pairs = [f / s for each in runs for s, f in zip(each["slow"], each["free"], strict=True)]
    waited = sum(sum(each["waited"]) for each in runs) / (slow + free)
    lost, middle = 1.0 - free / slow, 1.0 - statistics.median(pairs)
    return [
        ("time that the line takes, beside a free one", f"{100 * lost:.1f} %",
         f"{100 * middle:.1f} % in the middle of {len(pairs)} pairs", f"{100 * LOST:.0f} %", verdict(lost, LOST)),
        ("of all time, steps waited for the other cluster", f"{100 * waited:.1f} %", "", "", ""),
        ("a meeting crosses, each way", f"{runs[0]['bytes'] / 1e6:.1f} MB", "86 MB as float32", "", ""),
    ]  # fmt: skip


def _list_loss_rows(losses: dict[str, list[float]]) -> list[tuple[object, ...]]:
    noise = max(losses["together"]) - min(losses["together"])
    rows: list[tuple[object, ...]] = []
    for way in OUTERS:
        more = statistics.mean(a - b for a, b in zip(losses[way], losses["together"], strict=True))
        said = " ".join(f"{each:.4f}" for each in losses[way])
        beside = " ".join(f"{each:.4f}" for each in losses["together"])
        rows.append((f'loss, outer="{way}", beside every step together', said, beside, f"+{NEAR * noise:.4f}",
                     verdict(more, NEAR * noise)))  # fmt: skip
    return rows


def main() -> int:
    """Measure, print and write."""
    if not parser(__doc__).parse_args().quick:
        return run_all()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--every", "20", "--steps", "60", "--loss"]
        print(*run(LINE, [str(HERE / "site.py"), *words], Path(folder))[0], sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
