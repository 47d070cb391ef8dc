"""A classifier of 100,000 classes on two workers: replicated, sharded, and by MultiWorkerMirroredStrategy.

    python benchmarks/split/run.py           # ten minutes
    python benchmarks/split/run.py --quick   # few steps, nothing written
    sudo python benchmarks/split/run.py --rate 1gbit --only split replica mwms   # on two hosts joined by such a line

Contenders are started one after the other, forward and back (A B C C B A), since two of them do not fit into memory
together; each worker has one compute thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.split.hosts import ADDRESSES, join_hosts  # noqa: E402
from whale_nebula.launch import spawn  # noqa: E402
from whale_nebula.launch.placement import free_port  # noqa: E402

CONTENDERS = ("split", "alone", "replica", "mwms", "uncut")
OURS = ("split", "alone", "replica")
LABELS = {
    "split": "`nb.replica()` beside `nb.split()`", "alone": "`nb.split()` alone",
    "replica": "`nb.replica()` around all",
    "mwms": "MultiWorkerMirroredStrategy, own loop", "uncut": "one process, uncut",
}  # fmt: skip
WORKERS = {"a/0": "a", "a/1": "a"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
BARS = [("seconds", "replica", 1 / 3), ("peak", "replica", 0.60)]
"""Of the divided one, the median step and the peak of memory of a worker, as a share of another's."""
DEADLINE = 900


def measure(name: str, classes: int, steps: int, rate: str | None = None) -> dict[str, Any]:
    """Start a contender, on two hosts if there is a `rate`, run it, and end it; the slower worker counts, and the
    larger memory.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(folder / "door"))
        door.listen()
        door.settimeout(DEADLINE)
        start(stack, name, [str(classes), str(folder / "door")], folder, rate)
        lines = [
            stack.enter_context(stack.enter_context(door.accept()[0]).makefile("rw"))
            for _ in range(1 if name == "uncut" else 2)
        ]
        for line in lines:
            line.readline()
        for count in (2, steps):
            for line in lines:
                line.write(f"{count}\n")
                line.flush()
            told = [json.loads(line.readline()) for line in lines]
    seconds = [max(both) for both in zip(*(each["seconds"] for each in told), strict=True)]
    return {"seconds": seconds, "peak": max(each["peak"] - each["before"] for each in told)}


def start(stack: contextlib.ExitStack, name: str, words: list[str], folder: Path, rate: str | None) -> None:
    """Start the processes of a contender."""
    env = {**QUIET, "PYTHONPATH": f"{HERE}:{ROOT}"}
    script = [str(HERE / "ours.py"), name, *words]
    if name in OURS and not rate:
        stack.enter_context(spawn(["-m", "whale_nebula.launch.child", *script], WORKERS, seed=1, env=env))
        return
    hosts = stack.enter_context(join_hosts(rate)) if rate else [[], []]
    if name in OURS:
        commands = [(command, {}) for command in run_commands(script, folder)]
    elif name == "uncut":
        commands = [([sys.executable, *script], {})]
    else:
        commands = list(strategy_commands(words, rate))
    for (command, more), host in zip(commands, hosts, strict=False):
        process = subprocess.Popen([*host, *command], env={**os.environ, **env, **more}, cwd=HERE)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)


def run_commands(script: list[str], folder: Path) -> list[list[str]]:
    """The commands that start each of our workers on a separate host, with certificates."""
    path = folder / "clusters.yaml"
    workers = ", ".join(f"'{address}:7101'" for address in ADDRESSES)
    path.write_text(f"{{run: bench, seed: 1, clusters: {{a: {{workers: [{workers}]}}}}}}\n")
    command = [sys.executable, "-m", "whale_nebula"]
    for asked in (["init"], ["issue", "--all"]):
        words = ["certs", *asked, "--config", str(path), "--folder", str(folder / "certs")]
        subprocess.run([*command, *words], check=True, capture_output=True, cwd=ROOT)
    run = [*command, "run", "--config", str(path), "--cluster", "a", "--worker"]
    return [[*run, str(worker), *script] for worker in range(2)]


def strategy_commands(words: list[str], rate: str | None) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command of each process under the strategy, with its environment."""
    addresses = [f"{address}:{free_port()}" for address in (ADDRESSES if rate else ("127.0.0.1", "127.0.0.1"))]
    for index in range(2):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        yield [sys.executable, str(HERE / "mwms.py"), *words, str(index)], {"TF_CONFIG": json.dumps(config)}


def main() -> None:
    parser = common.parser(__doc__, "few steps, nothing written")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, help="these contenders alone; nothing written")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--rate", help="of a line between two network namespaces (root): 1gbit; nothing written")
    asked = parser.parse_args()
    names, steps = asked.only or CONTENDERS, 4 if asked.quick else 12
    machine = common.describe_machine()
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "peak": []} for name in names}
    for name in names if asked.quick else (*names, *reversed(names)):
        told = measure(name, asked.classes, steps, asked.rate)
        found[name]["seconds"] += told["seconds"]
        found[name]["peak"].append(told["peak"])
        print(name, round(median(told["seconds"]), 3), "s,", round(told["peak"]), "MiB", flush=True)
    short = {n: {"seconds": round(median(e["seconds"]), 3), "peak": round(max(e["peak"]))} for n, e in found.items()}
    rows: list[list[object]] = [["", "a step, s", "peak of a worker, MiB"]]
    rows += [[LABELS[name], each["seconds"], each["peak"]] for name, each in short.items()]
    for what, other, bar in BARS if {"split", "replica"} <= set(short) else ():
        ratio = short["split"][what] / short[other][what]
        rows.append([f"{what} beside {LABELS[other]}", f"{ratio:.2f}", common.verdict(ratio, bar)])
    for row in rows:
        print(*row, sep=" | ")
    if not (asked.quick or asked.only or asked.rate) and asked.classes == 100_000:
        common.write(__file__, {"machine": machine, "steps": 2 * steps, "found": short}, rows)


if __name__ == "__main__":
    main()
