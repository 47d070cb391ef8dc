"""From the kill of a worker to the next new step: who notices when, and what takes how long.

    python benchmarks/recovery/kills.py             # five kills
    python benchmarks/recovery/kills.py --times 1   # one, to see that it runs; writes nothing

Two clusters of one machine under `whale-nebula run --all --restarts 3`, over TLS. TensorFlow's start (imports) and the
first step with its tracing are told apart: what is left is what the library takes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import machine, verdict, write

COMMAND = [sys.executable, "-m", "whale_nebula.cli.main", "run", "--all", "--clusters", "gpu,npu", "--restarts", "3"]
SCRIPT = str(Path(__file__).with_name("killed.py"))
DIES = 21


def measure() -> dict[str, float]:
    """Seconds of one kill."""
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*COMMAND, SCRIPT, f"{folder}/saved", str(DIES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        watch = threading.Timer(300, process.kill)
        watch.start()
        for line in process.stdout or ():
            lines.append((time.time(), line.strip()))
        code = process.wait()
        watch.cancel()
    if code:
        raise SystemExit("\n".join(line for _, line in lines)[-4000:])
    died = next(float(line.split()[-1]) for _, line in lines if "EVENT dies" in line)
    noticed = next(at for at, line in lines if "failed first: ended by SIGKILL" in line)
    steps = [line.split("EVENT ")[1].split()[1:] for _, line in lines if "EVENT step" in line]
    again = [each for each in steps if int(each[1]) == 1]
    first = {worker: next(each for each in again if each[0] == worker) for worker in ("gpu/0", "npu/0")}
    new = max(float(each[3]) for each in first.values())
    started = min(float(each[5]) for each in first.values())
    imports = max(float(each[6]) - float(each[5]) for each in first.values())
    tracing = max(float(each[3]) - float(each[4]) for each in first.values())
    undone = DIES - (min(int(each[2]) for each in again) - 1)
    return {
        "noticed": noticed - died, "until processes start": started - noticed, "imports": imports,
        "first step with its trace": tracing, "all": new - died, "without these": new - died - imports - tracing,
        "steps undone": undone,
    }  # fmt: skip


def main() -> int:
    """Measure, print, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--times", type=int, default=5)
    times = arguments.parse_args().times
    found = []
    for _ in range(times):
        found.append(measure())
        print({name: round(each, 2) for name, each in found[-1].items()}, flush=True)
    middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
    bars: dict[str, tuple[str, float, str]] = {
        "noticed": ("from the kill until it is noticed", 2.0, "s"),
        "until processes start": (
            "until processes start again (1 s of it is the pause before the first restart)",
            0.0,
            "s",
        ),
        "imports": ("imports of TensorFlow, Keras and the library", 0.0, "s"),
        "first step with its trace": ("first step, with its trace", 0.0, "s"),
        "all": ("from the kill to the end of the next new step", 0.0, "s"),
        "without these": ("the same without imports and trace", 10.0, "s"),
        "steps undone": ("steps that were done again", 0.0, ""),
    }
    rows: list[list[Any]] = [["what", "median", "worst", "at most", "verdict"]]
    for name, (what, bar, unit) in bars.items():
        worst = max(each[name] for each in found)
        told = (
            [f"{middle[name]:.2f} {unit}", f"{worst:.2f} {unit}"] if unit else [f"{middle[name]:.0f}", f"{worst:.0f}"]
        )
        rows.append([what, *told, f"{bar:g} s" if bar else "", verdict(worst, bar) if bar else ""])
    if times > 1:
        write(__file__, {"machine": machine(), "kills": found}, rows, part="kills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
