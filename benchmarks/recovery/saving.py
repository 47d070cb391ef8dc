"""The slowdown of steps by saving 1 GB, and the bytes of it that another plan reads.

    python benchmarks/recovery/saving.py             # 1 GB
    python benchmarks/recovery/saving.py --mib 64    # a small one, to see that it runs; writes nothing

One process; steps with and without savings alternate in one run, compared by medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
from common import describe_machine, verdict, write

import whale_nebula as nb
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.ir.layout import SPLIT, Layout
from whale_nebula.runtime.checkpoint.level import choose_interval
from whale_nebula.runtime.checkpoint.slices import Source, find_slice
from whale_nebula.runtime.run import current_run

ROUNDS, STEPS = 4, 6


def train(mib: int, folder: str) -> dict[str, Any]:
    """Seconds of steps: of those without a saving, and of those from a saving until it is committed."""
    keras.utils.set_random_seed(1)
    width = int((mib * 2**20 / 2 / 4 / 2) ** 0.5)  # two matrices, with slots of equal size
    inputs = keras.Input((width,))
    outputs = keras.layers.Dense(width)(keras.layers.Dense(width, activation="relu")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(8, width)).astype("float32")
    idle: list[float] = []
    spells: list[dict[str, float]] = []
    with nb.init(checkpoint={"folder": folder, "every": 10**9}):
        model.fit(x, x, epochs=3, verbose=0)
        checkpoints, level = current_run().checkpoints, current_run().checkpoints.levels[0]
        for _ in range(ROUNDS):
            idle += [_step(model, x) for _ in range(STEPS)]
            began = time.perf_counter()
            checkpoints.save([level])
            blocked, busy = time.perf_counter() - began, []
            while not level._committing.done():
                busy.append(_step(model, x))
            spells.append(
                {"blocked": blocked, "steps": len(busy), "busy": sum(busy), "first": busy[0] if busy else 0.0}
            )
            spells[-1]["seconds"] = time.perf_counter() - began
        checkpoints.failed = True  # so that nothing is saved from here on
    return {"idle": idle, "spells": spells, "bytes": Folder(folder).scan()[0].manifests[""].size}


def _step(model: Any, x: Any) -> float:
    began = time.perf_counter()
    model.train_on_batch(x, x)
    return time.perf_counter() - began


def read(folder: str) -> list[dict[str, Any]]:
    """Bytes that a worker of another plan reads, compared with those that it needs."""
    found = Folder(folder).scan()[0]
    source = Source(found, found.manifests[""].identity)
    large = [name for name, form in source.tensors.items() if np.prod(form.shape) > 2**20]
    rows = []
    for layout in (Layout(), Layout(SPLIT, 0), Layout(SPLIT, 1)):
        needed, before, began = 0, _bytes_read(), time.perf_counter()
        for name in large:
            shape = source.tensors[name].shape
            part = find_slice(shape, layout, 2, 1) if layout.kind == SPLIT else None
            needed += source.read(name, part).numpy().nbytes
        rows.append(
            {
                "plan": str(layout),
                "seconds": time.perf_counter() - began,
                "read": _bytes_read() - before,
                "needed": needed,
            }
        )
    return rows


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text("utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def main() -> int:
    """Measure, print and write the result."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=1024)
    mib = arguments.parse_args().mib
    folder = tempfile.mkdtemp(prefix="recovery-")
    try:
        trained, restored = train(mib, folder), read(folder)
    finally:
        shutil.rmtree(folder)
    step, spells = statistics.median(trained["idle"]), trained["spells"]
    blocked = statistics.median(each["blocked"] for each in spells)
    cost = statistics.median(each["busy"] - each["steps"] * step + each["blocked"] for each in spells)
    taken = statistics.median(each["seconds"] for each in spells)
    interval = max(choose_interval(taken), 1e-9)
    rows: list[list[Any]] = [
        ["bytes of a checkpoint", f"{trained['bytes'] / 1e9:.3f} GB", "", ""],
        ["a step without saving", f"{step:.3f} s", "", ""],
        ["a step waits for a saving", f"{1e3 * blocked:.1f} ms", "50 ms", verdict(blocked, 0.05)],
        ["from there to the checkpoint", f"{taken:.2f} s", "", ""],
        ["steps are slower meanwhile, in all", f"{cost:.2f} s", "", ""],
        ["savings by default, every", f"{interval:.0f} s", "", ""],
        ["of the time", f"{100 * cost / interval:.2f} %", "3.5 %", verdict(cost / interval, 0.035)],
    ]
    for each in restored:
        ratio = each["read"] / each["needed"]
        rows.append(
            [
                f"read by a plan that has it {each['plan']}, of what it needs",
                f"{ratio:.3f}",
                "1.05",
                verdict(ratio, 1.05),
            ]
        )
        rows.append([f"{each['needed'] / 1e9:.2f} GB of it in", f"{each['seconds']:.2f} s", "", ""])
    for row in rows:
        print(*row, sep="  ")
    if mib == 1024:
        result = {"machine": describe_machine(), **trained, "restored": restored}
        write(__file__, result, [["what", "measured", "at most", "verdict"], *rows], part="saving")
    return 0


if __name__ == "__main__":
    sys.exit(main())
