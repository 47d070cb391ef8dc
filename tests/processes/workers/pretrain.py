"""Worker: pretrains with a generator in each cluster but the last, which has the discriminator; each has its own text.

`train_all` reports losses and networks; `train_large_step` takes one large step, and reports the frames that it sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import whale_nebula as nb
from tests.processes.frame_search import Frame, TextPatterns, record_frames
from tests.processes.worker_reports import digest_tensors, report_value
from tests.processes.worker_runs import run_selected
from tests.unit.models.pretraining.small_pretraining import (
    FIRST,
    LENGTH,
    Batch,
    batches,
    make_step,
    pretraining,
    stages,
)
from whale_nebula.models import BertSizes
from whale_nebula.wire.frame import Kind

STEPS = 3
THREE, COUNTS = ("romance", "slavic", "germanic"), (2, 4, 3)
WIDE = BertSizes(vocabulary=512, length=64, width=8, heads=2, layers=1, inner=16, dropout=0.0)
LARGE, SEARCHED_ROWS = 512, 32
"""Rows of the large step, enough for a precise mean number of bits; and those searched for in frames."""


def make_config(names: Sequence[str], length: int) -> dict[str, Any]:
    """Only its own generator reads a text."""
    form = {"shape": [None, length], "dtype": "int32"}
    return {"inputs": {f"texts/{name}": form for name in names}, "results": "everywhere", "weights": "own"}


def select_own_texts(batch: Batch) -> Batch:
    """The texts that this process may read, and the numbers of all rows."""
    numbers, texts = batch
    return numbers, {name: rows if nb.here().runs(name) else None for name, rows in texts.items()}  # type: ignore[misc]


def train_networks(names: tuple[str, ...] = THREE) -> None:
    """Train generators and a discriminator, each in its own cluster; report losses and the local networks."""
    model = pretraining(names)
    step = make_step(model, stages())
    losses = []
    for batch in batches(names, COUNTS[: len(names)], STEPS):
        losses.append({name: float(each).hex() for name, each in step(*select_own_texts(batch)).items()})
    report_value("losses", losses)
    for name, network in model.networks.items():
        if nb.here().runs(name):
            slots = model.optimizers[name].variables
            report_value(name, digest_tensors(each.numpy() for each in (*network.variables, *slots)))


def train_all() -> None:
    """Train between processes."""
    nb.init(make_config(THREE, LENGTH))
    train_networks(tuple(name for name in THREE if name in nb.here().clusters))


def train_large_step() -> None:
    """Train one step of one generator with many rows; report the sent bytes, and text found in them."""
    nb.init(make_config(["all"], WIDE.length))
    draw = np.random.default_rng(0)
    rows = draw.integers(FIRST, WIDE.vocabulary, (LARGE, WIDE.length)).astype(np.int32)
    rows[:, 0], rows[:, -1], rows[0, 1], rows[0, 2] = 2, 3, WIDE.vocabulary - 1, FIRST
    model = pretraining(("all",), sizes=WIDE, adam=False)
    step = make_step(model, stages())
    numbers = {"all": np.arange(LARGE, dtype=np.int32)}
    found = step(numbers, {"all": rows if nb.here().runs("all") else None})
    report_value("loss", float(found["discriminator"]).hex())
    nb.shutdown()
    frames = [(Frame.read(each), each) for each in recorded_frames if each]
    crossing = [(frame, each) for frame, each in frames if frame.kind == Kind.BOUNDARY]
    report_value(
        "frames",
        Counter(f"{frame.description} {list(frame.dims)}" for frame, _ in crossing),
    )
    report_value("bytes", sum(len(each) for _, each in crossing))
    inner = [row[1:-1].tolist() for row in rows[:SEARCHED_ROWS]]
    looked = TextPatterns.of([], inner, FIRST)
    hits = [hit for _, each in frames for hit in looked.find_in(each)]
    report_value("found", hits[:3])


if __name__ == "__main__":
    recorded_frames = record_frames()
    run_selected((train_all, train_large_step))
