"""Two replicas of a perceptron in two processes: seconds of a step relative to other libraries.

    python benchmarks/replica/run.py           # five minutes; PyTorch, where build/torch has it
    python benchmarks/replica/run.py --quick   # a minute, writes nothing

All contenders are started once and alternate, forward and back (A B C C B A); each has one compute thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from whale_nebula.launch import spawn  # noqa: E402
from whale_nebula.launch.placement import free_port  # noqa: E402

TORCH = ROOT / "build" / "torch" / "bin" / "python"
CONTENDERS = ("loop", "fit", "mwms", "ddp")
BARS = {("loop", "mwms"): 1.05, ("loop", "ddp"): 1.05, ("fit", "loop"): 1.10}
"""A contender's median step as a multiple of another's, at most."""
READY_MESSAGE = {
    "loop": "`nb.replica()`, own loop",
    "fit": "`nb.replica()`, Keras `fit`",
    "mwms": "MultiWorkerMirroredStrategy, own loop",
    "ddp": "PyTorch DDP, gloo",
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}


class Contender:
    """The processes of one contender, each behind a socket."""

    def __init__(self, lines: list[Any]) -> None:
        self.lines = lines

    def run_block(self, steps: int) -> list[float]:
        """Run `steps` steps; the slower process counts."""
        for line in self.lines:
            line.write(f"{steps}\n")
            line.flush()
        told = [json.loads(line.readline()) for line in self.lines]
        return [max(both) for both in zip(*told, strict=True)]


@contextlib.contextmanager
def start_contender(name: str) -> Iterator[Contender]:
    """Start a contender's two processes and wait until they are ready."""
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as address_or_port:
        address_or_port.settimeout(180)
        port = address_or_port.getsockname()[1]
        if name in ("loop", "fit"):
            script = ["-m", "whale_nebula.launch.child", str(HERE / "ours.py"), name, str(port)]
            env = {**QUIET, "PYTHONPATH": f"{HERE}:{ROOT}"}
            stack.enter_context(spawn(script, {"a/0": "a", "a/1": "a"}, seed=1, env=env))
        else:
            for command, more in _list_commands(name, port):
                process = subprocess.Popen(command, env={**os.environ, **QUIET, **more}, cwd=HERE)
                stack.callback(process.wait, 30)
                stack.callback(process.terminate)
        lines = [stack.enter_context(stack.enter_context(address_or_port.accept()[0]).makefile("rw")) for _ in range(2)]
        for line in lines:
            line.readline()
        yield Contender(lines)


def _list_commands(name: str, port: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command of each process, with its environment."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    for index in range(2):
        if name == "ddp":
            yield [str(TORCH), str(HERE / "ddp.py"), str(port), str(index), addresses[0]], {}
        else:
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            yield [sys.executable, str(HERE / "mwms.py"), str(port), str(index)], {"TF_CONFIG": json.dumps(config)}


def measure(names: list[str], steps: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of every step, by contender."""
    found: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        teams = {name: stack.enter_context(start_contender(name)) for name in names}
        for team in teams.values():
            team.run_block(10)
        for _ in range(rounds):
            for name in (*names, *reversed(names)):
                found[name] += teams[name].run_block(steps)
            print({name: round(1e3 * median(each), 2) for name, each in found.items()}, flush=True)
    return found


def make_rows(ms: dict[str, float]) -> list[list[object]]:
    """A line for each bar, head first."""
    found: list[list[object]] = [["what", "a step, ms", "beside", "a step, ms", "ratio", "at most", ""]]
    for (name, other), bar in BARS.items():
        if name in ms and other in ms:
            ratio = ms[name] / ms[other]
            both = READY_MESSAGE[name], ms[name], READY_MESSAGE[other], ms[other]
            found.append([*both, f"{ratio:.2f}", bar, common.verdict(ratio, bar)])
    return found


def main() -> None:
    parser = common.parser(__doc__, "few steps, nothing written")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, help="these contenders alone; nothing written")
    asked = parser.parse_args()
    names = [name for name in asked.only or CONTENDERS if name != "ddp" or TORCH.exists()]
    steps, rounds = (10, 2) if asked.quick else (30, 6)
    machine = common.describe_machine()
    found = measure(names, steps, rounds)
    ms = {name: round(1e3 * median(each), 2) for name, each in found.items()}
    result = {"machine": machine, "steps": {name: len(each) for name, each in found.items()}, "ms": ms}
    for row in make_rows(ms):
        print(*row, sep=" | ")
    if not asked.quick and not asked.only:
        common.write(__file__, result, make_rows(ms))


if __name__ == "__main__":
    main()
