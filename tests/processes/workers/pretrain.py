"""Worker: pretrains with a generator in each cluster but the last, which has the discriminator; each has its own text.

`learn` tells what its network came to; `look` takes a large step, and tells what boundaries' frames it sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import whale_nebula as nb
from tests.processes.frame_search import Frame, Look, watched
from tests.processes.worker_reports import bits, tell
from tests.processes.worker_runs import act
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
LARGE, LOOKED_FOR = 512, 32
"""Rows: as many as make the mean number of bits sure; and those that are searched for in frames."""


def config(names: Sequence[str], length: int) -> dict[str, Any]:
    """Each generator reads its own text, and nobody else does."""
    form = {"shape": [None, length], "dtype": "int32"}
    return {"inputs": {f"texts/{name}": form for name in names}, "results": "everywhere", "weights": "own"}


def read(batch: Batch) -> Batch:
    """The texts that this process may read, and all rows' numbers."""
    numbers, texts = batch
    return numbers, {name: rows if nb.here().runs(name) else None for name, rows in texts.items()}  # type: ignore[misc]


def train(names: tuple[str, ...] = THREE) -> None:
    """Generators and a discriminator, each in its own cluster; tells losses, and the network that is here."""
    model = pretraining(names)
    step = make_step(model, stages())
    losses = []
    for batch in batches(names, COUNTS[: len(names)], STEPS):
        losses.append({name: float(each).hex() for name, each in step(*read(batch)).items()})
    tell("losses", losses)
    for name, network in model.networks.items():
        if nb.here().runs(name):
            slots = model.optimizers[name].variables
            tell(name, bits(each.numpy() for each in (*network.variables, *slots)))


def learn() -> None:
    """The same between processes."""
    nb.init(config(THREE, LENGTH))
    train(tuple(name for name in THREE if name in nb.here().clusters))


def look() -> None:
    """One step of one generator with many rows: what crosses, in bytes; and whether the text is in it as it was."""
    nb.init(config(["all"], WIDE.length))
    draw = np.random.default_rng(0)
    rows = draw.integers(FIRST, WIDE.vocabulary, (LARGE, WIDE.length)).astype(np.int32)
    rows[:, 0], rows[:, -1], rows[0, 1], rows[0, 2] = 2, 3, WIDE.vocabulary - 1, FIRST
    model = pretraining(("all",), sizes=WIDE, adam=False)
    step = make_step(model, stages())
    numbers = {"all": np.arange(LARGE, dtype=np.int32)}
    found = step(numbers, {"all": rows if nb.here().runs("all") else None})
    tell("loss", float(found["discriminator"]).hex())
    nb.shutdown()
    frames = [(Frame.read(each), each) for each in taken if each]
    crossing = [(read, each) for read, each in frames if read.kind == Kind.BOUNDARY]
    tell("frames", Counter(f"{read.said} {list(read.dims)}" for read, _ in crossing))
    tell("bytes", sum(len(each) for _, each in crossing))
    inner = [row[1:-1].tolist() for row in rows[:LOOKED_FOR]]
    looked = Look.of([], inner, FIRST)
    hits = [hit for _, each in frames for hit in looked.finds(each)]
    tell("found", hits[:3])


if __name__ == "__main__":
    taken = watched()
    act((learn, look))
