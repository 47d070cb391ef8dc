"""A transformer in two sites over a slow line, compared with torch.distributed.pipelining and with its closed form.

    python benchmarks/wan_pipeline/run.py           # needs root, /dev/net/tun; installs PyTorch in build/torch
    python benchmarks/wan_pipeline/run.py --quick   # one rate, few steps, without PyTorch; writes nothing

Each site is a separate network namespace (tools/wan.py), with one compute thread. Ours runs as users run it:
`whale-nebula run --cluster ...` in each site, mutual TLS, no compression. The computing time of a micro-batch is that
of a run over a free line; the closed form is that of eager-1F1B on two stages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_form import eager_seconds
from common import install_torch, verdict
from two_sites import DEADLINE, FREE, Line, run, run_benchmark, sites

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = ROOT / "build" / "torch"
SHAPE = {"rows": 32, "length": 64, "vocabulary": 4000, "width": 512, "heads": 8, "blocks": 4, "micro_batches": 8}
LINES = (("60mbit", "20ms"), ("120mbit", "20ms"))
BAR = 1.05


def list_arguments(steps: int) -> list[str]:
    """The sizes, as options of both sides."""
    shape = {**SHAPE, "steps": steps}
    return [word for name, size in shape.items() for word in (f"--{name.replace('_', '-')}", str(size))]


def run_ours(line: Line, steps: int, folder: Path) -> dict[str, Any]:
    """One run of whale_nebula over a line."""
    (one, other), crossed = run(line, [str(HERE / "ours.py"), *list_arguments(steps)], folder)
    if one["weights"] != other["weights"]:
        raise SystemExit("the sites ended with different weights")
    return {"seconds": max(one["median"], other["median"]), "weights": one["weights"], "crossed": crossed}


def run_torch(line: Line, steps: int) -> dict[str, Any]:
    """One run of PyTorch over a line."""
    script = [
        str(TORCH / "bin" / "python"),
        str(HERE / "torch_side.py"),
        *list_arguments(steps),
        "--address",
        "10.77.0.1:29500",
    ]
    command = ["env", "GLOO_SOCKET_IFNAME=wan0", *script]
    (one, other), crossed = sites(line, [command, command])
    return {"seconds": max(one["median"], other["median"]), "crossed": crossed}


def run_in_one_process(steps: int) -> str:
    """The digest of the final weights of the same plan in one process."""
    ended = subprocess.run(
        [sys.executable, str(HERE / "ours.py"), *list_arguments(steps), "--links", "10gbit,0ms"],
        capture_output=True, text=True, timeout=DEADLINE, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
    )  # fmt: skip
    return str(json.loads(ended.stdout.splitlines()[-1])["weights"])


def compute_closed_form(free: float, line: Line) -> float:
    """The seconds of a step over a line, from those over a free one."""
    many = SHAPE["micro_batches"]
    rate = float(line[0].removesuffix("mbit")) * 1e6
    size = SHAPE["rows"] * SHAPE["length"] * SHAPE["width"] * 4 / many
    delay = float(line[1].removesuffix("ms")) / 1e3
    return eager_seconds(2, many, free / (many + 1), size * 8 / rate, delay)


def measure(lines: Sequence[Line], steps: int, rounds: int, with_torch: bool) -> list[dict[str, Any]]:
    """All lines, ours and PyTorch alternating."""
    kept: dict[tuple[str, Line], list[float]] = {}
    digests = set()
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            for line in (FREE, *lines):
                found = run_ours(line, steps, Path(name))
                digests.add(found["weights"])
                kept.setdefault(("ours", line), []).append(found["seconds"])
                print("ours ", *line, round(found["seconds"], 3), found["crossed"], flush=True)
                if with_torch:
                    theirs = run_torch(line, steps)
                    kept.setdefault(("torch", line), []).append(theirs["seconds"])
                    print("torch", *line, round(theirs["seconds"], 3), theirs["crossed"], flush=True)
    digests.add(run_in_one_process(steps))
    if len(digests) > 1:
        raise SystemExit("the runs did not end with the same weights")
    middle = {key: statistics.median(values) for key, values in kept.items()}
    return [_make_row(line, middle) for line in (FREE, *lines)]


def _make_row(line: Line, middle: dict[tuple[str, Line], float]) -> dict[str, Any]:
    took, theirs = middle["ours", line], middle.get(("torch", line))
    row: dict[str, Any] = {"line": "free" if line == FREE else ", ".join(line), "ours": round(took, 3)}
    row["torch"] = None if theirs is None else round(theirs, 3)
    row["faster"] = None if theirs is None else round(theirs / took, 2)
    if line != FREE:
        form = compute_closed_form(middle["ours", FREE], line)
        row |= {"closed form": round(form, 3), "ratio": round(took / form, 3), "verdict": verdict(took / form, BAR)}
    return row


def compare_with_torch(steps: int, rounds: int) -> list[dict[str, Any]]:
    """All lines, with PyTorch installed if it is missing."""
    install_torch()
    return measure(LINES, steps, rounds, with_torch=True)


def main() -> int:
    """Measure, print and write the result."""
    return run_benchmark(
        __file__,
        __doc__,
        whole=compare_with_torch,
        quick=lambda: measure(LINES[:1], 4, 1, with_torch=False),
        quick_help="one rate, few steps, without PyTorch",
        steps=12,
        shape=SHAPE,
        keys=("line", "ours", "torch", "faster", "closed form", "ratio", "verdict"),
    )


if __name__ == "__main__":
    sys.exit(main())
