"""The time from the kill of a worker to the next new step, by its parts.

    python benchmarks/recovery/kills.py             # five kills of each
    python benchmarks/recovery/kills.py --times 1   # one, to see that it runs; writes nothing

Two clusters of one machine under `whale-nebula run --all --restarts 3`, over TLS; and, alternating with them, two
workers of TensorFlow's MultiWorkerMirroredStrategy and of torchft (PyTorch is installed in build/torch), which this
script restarts as a supervisor would. The start of the framework (imports) and the first step with its tracing are
listed separately: the rest is due to the library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, install_torch, verdict, write

from whale_nebula.launch.placement import free_port

COMMAND = [sys.executable, "-m", "whale_nebula.cli.main", "run", "--all", "--clusters", "gpu,npu", "--restarts", "3"]
HERE = Path(__file__).parent
DIES, DEADLINE, PAUSE, SETTLING = 21, 300.0, 1.0, 20.0
BARS: dict[str, tuple[str, float]] = {
    "noticed": ("from the kill until the other worker's step has ended", 2.0),
    "ended": ("until all processes of that start have ended", 0.0),
    "until processes start": ("until processes start again (1 s of it is the pause before the first restart)", 0.0),
    "imports": ("imports of TensorFlow, Keras and the library", 0.0),
    "first step with its trace": ("first step, with its trace", 0.0),
    "all": ("from the kill to the end of the next new step", 0.0),
    "both": ("from the kill to the next new step of both workers", 0.0),
    "without these": ("the same without imports and trace", 10.0),
    "steps undone": ("steps that were done again", 0.0),
}


def measure(*options: str) -> dict[str, float]:
    """Seconds of one kill."""
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*COMMAND, *options, str(HERE / "kills_worker.py"), f"{folder}/saved", str(DIES), str(SETTLING)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        watch = threading.Timer(DEADLINE, process.kill)
        watch.start()
        for line in process.stdout or ():
            lines.append((time.time(), line.strip()))
        code = process.wait()
        watch.cancel()
    said = [line for _, line in lines]
    if code:
        raise SystemExit("\n".join(said)[-4000:])
    hears = float(next(line for line in said if "EVENT hears" in line).split()[-1])
    ended = next(at for at, line in lines if "failed first: ended by SIGKILL" in line)
    return parse_events(said, hears, ended)


def measure_standby() -> dict[str, float]:
    """Seconds of one kill with standby processes."""
    return measure("--standby")


def measure_mirrored() -> dict[str, float]:
    """Seconds of one kill with MultiWorkerMirroredStrategy: the other worker fails, and both are restarted."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        ended = run_mirrored(folder, 0, said)
        time.sleep(PAUSE)
        run_mirrored(folder, 1, said)
    return parse_events(said, ended, ended)


def run_mirrored(folder: str, start: int, said: list[str]) -> float:
    """Start both workers, and wait until both have ended; returns that time."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = [
        start_worker(
            [sys.executable, str(HERE / "kills_mirrored.py"), folder, str(DIES), str(start)], said,
            TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}),
        )
        for index in range(2)
    ]  # fmt: skip
    for wait in processes:
        wait()
    return time.time()


def start_worker(command: list[str], said: list[str], **env: str) -> Callable[[], None]:
    """Start a worker whose lines are added to `said`; returns a function that waits until it has ended."""
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    watch = threading.Timer(DEADLINE, process.kill)
    reader = threading.Thread(target=lambda: said.extend(process.stdout or ()))
    watch.start()
    reader.start()

    def wait() -> None:
        process.wait()
        watch.cancel()
        reader.join()

    return wait


def measure_torchft() -> dict[str, float]:
    """Seconds of one kill with torchft: the other worker continues alone, and the killed one is restarted."""
    said: list[str] = []
    torch, address = install_torch("torchft==0.2.0"), f"127.0.0.1:{free_port()}"
    command = [str(torch.with_name("torchft_lighthouse")), "--min_replicas", "1", "--join_timeout_ms", "1000"]
    lighthouse = subprocess.Popen([*command, "--bind", address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start(index: int, start: int) -> Callable[[], None]:
        words = [str(torch), str(HERE / "kills_torchft.py"), str(index), str(DIES), str(start)]
        return start_worker(words, said, TORCHFT_LIGHTHOUSE=f"http://{address}")

    try:
        survivor, killed = start(0, 0), start(1, 0)
        killed()
        ended = time.time()
        time.sleep(PAUSE)
        for wait in (start(1, 1), survivor):
            wait()
    finally:
        lighthouse.kill()
        lighthouse.wait()
    return parse_torchft(said, ended)


def parse_torchft(said: list[str], ended: float) -> dict[str, float]:
    """The times of the events of torchft's workers, as `parse_events` returns them. The survivor's first step alone is
    also where it has noticed.
    """
    died = next(float(line.split()[-1]) for line in said if "EVENT dies" in line)
    steps = [line.split("EVENT ")[1].split() for line in said if "EVENT step" in line or "EVENT fails" in line]
    alone = next(each for each in steps if each[1] == "0" and float(each[4]) > died and each[8] == "1")
    again = [each for each in steps if each[2] == "1"]
    joined = next(float(each[4]) for each in again if each[8] == "2")
    new, started, first = float(alone[4]) - died, float(again[0][6]), again[0]
    undone = sum(each[0] == "fails" and each[1] == "0" and float(each[4]) > died for each in steps)
    return {
        "noticed": new, "until processes start": started - ended, "imports": float(first[7]) - started,
        "first step with its trace": float(first[4]) - float(first[5]), "all": new, "both": joined - died,
        "without these": new, "steps undone": undone,
    }  # fmt: skip


def parse_events(said: list[str], hears: float, ended: float) -> dict[str, float]:
    """The times of events printed by workers: "EVENT step WORKER START NUMBER ENDED ASKED STARTED IMPORTED". A
    standby process was started before the kill, and counts from the end of the launcher's pause.
    """
    died = next(float(line.split()[-1]) for line in said if "EVENT dies" in line)
    steps = [line.split("EVENT ")[1].split()[1:] for line in said if "EVENT step" in line]
    again = [each for each in steps if int(each[1]) == 1]
    first = [next(each for each in again if each[0] == worker) for worker in sorted({each[0] for each in again})]
    starts = [float(each[5]) if float(each[5]) > died else ended + PAUSE for each in first]
    new, started = max(float(each[3]) for each in first), min(starts)
    imports = max(float(each[6]) - start for each, start in zip(first, starts, strict=True))
    tracing = max(float(each[3]) - float(each[4]) for each in first)
    return {
        "noticed": hears - died, "ended": ended - died, "until processes start": started - ended, "imports": imports,
        "first step with its trace": tracing, "all": new - died, "both": new - died,
        "without these": new - died - imports - tracing,
        "steps undone": DIES - (min(int(each[2]) for each in again) - 1),
    }  # fmt: skip


def main() -> int:
    """Measure, print and write the result."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--times", type=int, default=5)
    times = arguments.parse_args().times
    found: dict[str, list[dict[str, float]]] = {"kills": [], "standby": [], "mirrored": [], "torchft": []}
    for _ in range(times):
        acts = (measure, measure_standby, measure_mirrored, measure_torchft)
        for kept, act in zip(found.values(), acts, strict=True):
            kept.append(act())
            print(act.__name__, {name: round(each, 2) for name, each in kept[-1].items()}, flush=True)
    rows: list[list[Any]] = [
        ["what", "median", "worst", "at most", "verdict", "with --standby, median",
         "MultiWorkerMirroredStrategy, median", "torchft 0.2, median"]
    ]  # fmt: skip
    for name, (what, bar) in BARS.items():
        unit, digits = ("", 0) if name == "steps undone" else (" s", 2)
        ours, *others = ([each[name] for each in kept if name in each] for kept in found.values())
        combined = [statistics.median(ours), max(ours), *(statistics.median(each) if each else None for each in others)]
        told = ["" if each is None else f"{each:.{digits}f}{unit}" for each in combined]
        rows.append([what, *told[:2], *([f"{bar:g} s", verdict(max(ours), bar)] if bar else ["", ""]), *told[2:]])
    if times > 1:
        write(__file__, {"machine": describe_machine(), **found}, rows, part="kills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
