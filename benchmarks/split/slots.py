"""Sharded optimizer slots: four replicas on this machine, with whole slots and with `nb.replica(shard=...)`.

    python benchmarks/split/slots.py           # two minutes
    python benchmarks/split/slots.py --quick   # few steps, nothing written

Each of four processes holds the same model three times, once for each variant, and runs blocks of steps of one after
the other, forward and back (A B C C B A), with one compute thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from whale_nebula.launch import spawn  # noqa: E402

WIDTH, LAYERS, ROWS, COUNT = 1024, 4, 128, 4
WEIGHTS = 4 * LAYERS * WIDTH * (WIDTH + 1)
SHARDS = {
    "whole": 'whole slots, `nb.replica()`', "optimizer": '`nb.replica(shard="optimizer")`',
    "gradients": '`nb.replica(shard="gradients")`',
}  # fmt: skip
WORKERS = {f"a/{n}": "a" for n in range(COUNT)}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
BARS = {"a step": ("seconds", 1.10), "slots": ("slots", 1.05 / COUNT), "what a worker sends": ("sent", 1.10)}
"""What slots in parts may take, as a share of whole ones."""
DEADLINE, MIB = 600, 1 << 20


# ---------------------------------------------------------------------- a worker
def build_step(name: str) -> Callable[[], object]:
    """A step of a separate model."""
    import keras
    import tensorflow as tf

    import whale_nebula as nb

    layers = [keras.layers.Dense(WIDTH, activation="relu", name=f"{name}{n}") for n in range(LAYERS)]
    optimizer = keras.optimizers.Adam(1e-4)
    x = tf.random.stateless_normal([ROWS, WIDTH], [1, 2])

    @nb.function
    def train(x: tf.Tensor) -> tf.Tensor:
        with nb.cluster(["a"]), nb.replica(shard=None if name == "whole" else name), tf.GradientTape() as tape:
            hidden = x
            for layer in layers:
                hidden = layer(hidden)
            loss = tf.reduce_mean((hidden - x) ** 2)
        weights = [weight for layer in layers for weight in layer.trainable_variables]
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return lambda: float(train(x))


def count_sent() -> int:
    """Bytes sent over the loopback interface so far."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text("ascii"))


def run_worker(port: int) -> None:
    """Run blocks of steps on request, and report the results of each variant."""
    import tensorflow as tf

    import whale_nebula as nb
    from benchmarks.replica.step_server import blocks

    tf.config.threading.set_intra_op_parallelism_threads(1)
    nb.init()
    steps = {name: build_step(name) for name in SHARDS}
    for count, say in blocks(port, "slots"):
        told: dict[str, Any] = {name: {"seconds": [], "sent": []} for name in SHARDS}
        for name in (*SHARDS, *reversed(SHARDS)):
            for _ in range(count):
                sent, began = count_sent(), time.perf_counter()
                steps[name]()
                told[name]["seconds"].append(time.perf_counter() - began)
                told[name]["sent"].append((count_sent() - sent) / COUNT)
            report = nb.last_report()
            told[name]["slots"] = report.workers[report.worker].variable_bytes - WEIGHTS
        say(told)


# ---------------------------------------------------------------------- the benchmark
@contextlib.contextmanager
def start_workers() -> Iterator[Callable[[int], list[dict[str, Any]]]]:
    """The four processes; yields a function that runs a block in all of them and returns their reports."""
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        door.settimeout(DEADLINE)
        script = ["-m", "whale_nebula.launch.child", __file__, "--work", str(door.getsockname()[1])]
        env = {**QUIET, "PYTHONPATH": f"{HERE}:{ROOT}"}
        stack.enter_context(spawn(script, WORKERS, seed=1, env=env))
        lines = [stack.enter_context(stack.enter_context(door.accept()[0]).makefile("rw")) for _ in WORKERS]
        for line in lines:
            line.readline()

        def ask(count: int) -> list[dict[str, Any]]:
            for line in lines:
                line.write(f"{count}\n")
                line.flush()
            return [json.loads(line.readline()) for line in lines]

        yield ask


def summarize(told: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each variant the median step of the slowest worker, the maximum of slots, and the bytes that a worker sent in
    the median step.
    """
    found = {}
    for name in SHARDS:
        each = [worker[name] for worker in told]
        slowest = [max(all_of) for all_of in zip(*(one["seconds"] for one in each), strict=True)]
        found[name] = {
            "seconds": round(median(slowest), 3),
            "slots": round(max(one["slots"] for one in each) / MIB, 2),
            "sent": round(median(sent for one in each for sent in one["sent"]) / MIB, 1),
        }
    return found


def main() -> None:
    parser = common.parser(__doc__, "few steps, nothing written")
    parser.add_argument("--work", type=int, metavar="PORT", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        run_worker(asked.work)
        return
    machine, steps = common.describe_machine(), 3 if asked.quick else 15
    with start_workers() as ask:
        ask(2)
        found = summarize(ask(steps))
    rows: list[list[object]] = [["", "a step, s", "slots of a worker, MiB", "a worker sends a step, MiB"]]
    rows += [[SHARDS[name], *each.values()] for name, each in found.items()]
    for name in ("optimizer", "gradients"):
        for said, (what, bar) in BARS.items():
            ratio = found[name][what] / found["whole"][what]
            rows.append([f"{said}, {SHARDS[name]} beside whole slots", f"{ratio:.3f}", common.verdict(ratio, bar), ""])
    for row in rows:
        print(*row, sep=" | ")
    if not asked.quick:
        common.write(__file__, {"machine": machine, "steps": 2 * steps, "found": found}, rows, part="slots")


if __name__ == "__main__":
    main()
