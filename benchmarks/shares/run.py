"""Replicas of unequal speed, and one generator that feeds eight discriminators: a step compared with the ideal.

    python benchmarks/shares/run.py             # ten minutes
    python benchmarks/shares/run.py --quick     # two cases with few steps; writes nothing

Stages sleep for their nominal computing time, so two cores are enough. The ideal is the work of a step divided by the
speeds of all replicas together, or the generator's time, if that is longer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, spread, verdict, write

from whale_nebula.launch.placement import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEP_BAR, BUSY_BAR, DEADLINE = 1.10, 0.90, 600


@dataclass(frozen=True)
class Case:
    """Replicas with these speeds and seconds for a row at speed 1; a generator may feed them. If they are `apart`, each
    is a separate cluster, and they synchronise after so many steps.
    """

    name: str
    speeds: tuple[float, ...]
    rows: int
    seconds: float
    micro_batch: int = 1
    is_configured: bool = True
    generator: float | None = None
    warm: int = 7
    steps: int = 10
    bars: bool = True
    apart: int = 0

    @property
    def ideal(self) -> float:
        """The seconds of a step in which all replicas are busy all the time."""
        return self.rows * max(self.seconds / sum(self.speeds), self.generator or 0.0)


CASES = (
    Case("1 : 2, in turn, 2 micro-batches", (1, 2), 48, 0.1, micro_batch=2, is_configured=False, bars=False),
    Case("1 : 2, the config says so", (1, 2), 48, 0.1),
    Case("1 : 2, seen, 6 micro-batches", (1, 2), 48, 0.1, micro_batch=6, is_configured=False),
    Case("a cluster of speed 1 and one of 2, which meet every 4 steps", (1, 2), 48, 0.1, apart=4),
    Case("1 generator to 8", (1,) * 8, 200, 0.8, micro_batch=200, generator=0.1, warm=2, steps=4),
    Case("1 generator to 8, half of these at half speed", (1,) * 4 + (0.5,) * 4, 200, 0.6, micro_batch=200,
         generator=0.1, warm=2, steps=4),
)  # fmt: skip


def write_config(case: Case, path: Path) -> dict[str, float]:
    """Write clusters.yaml; returns the speeds by worker."""
    workers = [{"address": f"127.0.0.1:{free_port()}"} for _ in case.speeds]
    if case.is_configured:
        workers = [{**each, "speed": speed} for each, speed in zip(workers, case.speeds, strict=True)]
    if case.apart:
        named = {f"c{number}": {"workers": [each]} for number, each in enumerate(workers)}
        path.write_text(yaml.safe_dump({"seed": 1, "clusters": named}, sort_keys=False))
        return {f"c{number}/0": float(speed) for number, speed in enumerate(case.speeds)}
    clusters: dict[str, Any] = {"npu": {"workers": workers}}
    if case.generator is not None:
        clusters = {"gpu": {"workers": [f"127.0.0.1:{free_port()}"]}, **clusters}
    path.write_text(yaml.safe_dump({"seed": 1, "clusters": clusters}, sort_keys=False))
    return {f"npu/{number}": float(speed) for number, speed in enumerate(case.speeds)}


def run_case(case: Case) -> list[dict[str, Any]]:
    """Run a case; returns the output of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clusters.yaml"
        about = {name: getattr(case, name) for name in ("rows", "seconds", "micro_batch", "warm", "steps", "apart")}
        about |= {"replicas": len(case.speeds), "speeds": write_config(case, path)}
        about |= {} if case.generator is None else {"generator": case.generator}
        command = [sys.executable, "-m", "whale_nebula.cli.main", "run", "--all", "--config", str(path)]
        ended = subprocess.run(
            [*command, str(HERE / "program.py"), json.dumps(about)], capture_output=True, text=True, timeout=DEADLINE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}, cwd=ROOT,
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{case.name} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"site"')]


def make_row(case: Case, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table's row for a case; the slowest process determines the seconds of a step."""
    steps = [max(each) for each in zip(*(each["seconds"] for each in told), strict=True)]
    step = statistics.median(steps)
    found = {"case": case.name, "micro-batches": told[0]["micro_batches"], "ideal, s": round(case.ideal, 3)}
    found |= {"a step, s": round(step, 3), "by the ideal": round(step / case.ideal, 3), "": ""}
    if case.bars:
        found[""] = verdict(step / case.ideal, STEP_BAR)
    found |= {"generator busy": "", " ": ""}
    if case.generator is not None and case.rows * case.generator >= case.ideal:
        busy = statistics.median(next(each for each in told if each["site"] == "gpu/0")["busy"])
        found |= {"generator busy": round(busy, 3), " ": verdict(busy, BUSY_BAR, least=True)}
    return {**found, "spread": spread(steps), "notes": told[0]["notes"], "straggler": told[0]["straggler"]}


def main() -> int:
    """Run every case once."""
    made = parser(__doc__, "two cases with few steps; writes nothing")
    made.add_argument("--only", type=int, choices=range(len(CASES)), help="this case alone; writes nothing")
    chosen = made.parse_args()
    quick = chosen.quick or chosen.only is not None
    about, rows = describe_machine(), []
    cases = CASES if chosen.only is None else CASES[chosen.only : chosen.only + 1]
    for case in CASES[1:3] if chosen.quick else cases:
        rows.append(make_row(case, run_case(replace(case, steps=4) if quick else case)))
        print(rows[-1], flush=True)
    if not quick:
        bars = {"step": STEP_BAR, "generator": BUSY_BAR}
        keys = [key for key in rows[0] if key not in ("spread", "notes", "straggler")]
        table = [keys, *([each[key] for key in keys] for each in rows)]
        write(__file__, {"machine": about, "bars": bars, "rows": rows}, table)
    return int(any("missed" in each.values() for each in rows) and not quick)


if __name__ == "__main__":
    sys.exit(main())
