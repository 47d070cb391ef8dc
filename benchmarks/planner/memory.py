"""Predicted memory of a worker compared with the measured memory of its tensors.

    python benchmarks/planner/memory.py            # all; writes memory.json
    python benchmarks/planner/memory.py --quick    # one, nothing is written

The prediction covers tensors: weights, gradients, slots, activations for the backward, and temporaries of an update.
TensorFlow counts its allocations, on a CPU as on a GPU; the maximum after the first steps is compared. The process uses
more, for TensorFlow, the trace and the script, and for memory that the C library does not return. Two clusters are two
processes of this machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common import describe_machine, parser, verdict, write  # noqa: E402
from prediction import SCRIPT, train, use_own_cache  # noqa: E402

BAR = 0.10


class Case(NamedTuple):
    """A model, its plan, and the factors of its width and rows."""

    model: str
    plan: str
    scale: int
    rows: int


CASES = (
    Case("transformer", "one", 4, 1),
    Case("transformer", "one", 1, 16),
    Case("transformer", "0.5,4", 4, 4),
    Case("translator", "one", 4, 2),
    Case("translator", "0.5,4", 4, 2),
    Case("convolutions", "one", 2, 8),
    Case("convolutions", "0.5,4", 2, 8),
    Case("classes", "one", 8, 1),
    Case("classes", "0.3,4", 8, 2),
)


def measure(case: Case) -> list[dict[str, Any]]:
    """A row for each worker."""
    rows = []
    for name, (predicted, measured) in _peaks(case).items():
        rows.append({**case._asdict(), "worker": name, "predicted_mb": round(predicted / 1e6, 1),
                     "measured_mb": round(measured / 1e6, 1), "error": round(predicted / measured - 1, 3)})  # fmt: skip
    return rows


def _peaks(case: Case) -> dict[str, tuple[int, int]]:
    """By worker, the predicted memory and the maximum of its tensors."""
    words = [SCRIPT, case.model, case.plan, "--steps", "6", "--scale", str(case.scale), "--rows", str(case.rows)]
    if case.plan == "one":
        told = train([*words, "--line", "free"])
        return {"one": (sum(told[0]["memory_predicted"].values()), told[0]["tensors_most"])}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "clusters.yaml"
        config.write_text(json.dumps({"clusters": {"gpu": {}, "npu": {}}, "seed": 1}))
        told = train(["-m", "whale_nebula.cli.main", "run", "--all", "--config", str(config), *words])
    found = {}
    for each in told:
        worker = next(name for name in each["memory_predicted"] if name.startswith(each["site"]))
        found[worker] = (each["memory_predicted"][worker], each["tensors_most"])
    return found


def main() -> int:
    """Measure, print and write."""
    quick = parser(__doc__).parse_args().quick
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    rows: list[dict[str, Any]] = []
    with use_own_cache():
        for case in CASES[:1] if quick else CASES:
            rows += measure(case)
            print(rows[-1], flush=True)
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    print(f"mean error {mean:.3f}")
    if not quick:
        table = [
            ("model", "plan", "wider", "more rows", "worker", "predicted", "measured", "error"),
            *map(_describe, rows),
        ]
        table.append(("mean of errors", "", "", "", "", "", f"bar {BAR:.0%}", f"{mean:.0%} {verdict(mean, BAR)}"))
        result = {"machine": describe_machine(), "mean_error": round(mean, 4), "rows": rows}
        write(__file__, result, table, "memory")
    return 0


def _describe(row: dict[str, Any]) -> tuple[object, ...]:
    sizes = (f"{row['predicted_mb']:.0f} MB", f"{row['measured_mb']:.0f} MB", f"{row['error']:+.0%}")
    return (row["model"], row["plan"], f"{row['scale']} x", f"{row['rows']} x", row["worker"], *sizes)


if __name__ == "__main__":
    raise SystemExit(main())
