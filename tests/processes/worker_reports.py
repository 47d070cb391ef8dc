"""A worker's reports to the test: a line of JSON on its standard output for each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import whale_nebula as nb
from tests.same import Outcome
from whale_nebula.launch import attach

MARK = "told: "
_NAME = "[]/ abcdefghijklmnopqrstuvwxyz0123456789"


def tell(name: str, value: Any) -> None:
    """Say one thing."""
    print(MARK + json.dumps([name, value]), flush=True)


def told(out: str) -> dict[str, Any]:
    """All that a worker said, or the workers of a cluster, whose names a launcher writes before their lines."""
    said = (line.partition(MARK) for line in out.splitlines())
    return dict(json.loads(value) for before, mark, value in said if mark and not before.strip(_NAME))


def bits(tensors: Iterable[Any]) -> list[str]:
    """What is the same only where tensors are the same bit for bit."""
    arrays = [np.ascontiguousarray(tensor) for tensor in tensors]
    return [f"{a.dtype}{list(a.shape)} {hashlib.sha256(a.tobytes()).hexdigest()}" for a in arrays]


def left(outcome: Outcome) -> dict[str, Any]:
    """Everything that a trial of the zoo left, bit for bit."""
    return {
        "losses": [float(loss).hex() for loss in outcome.losses],
        "history": {name: [float(v).hex() for v in values] for name, values in outcome.history.items()},
        "gradients": bits(outcome.gradients),
        "weights": bits(outcome.weights),
        "outputs": bits(outcome.outputs),
        "stages": list(outcome.stages),
    }


def sent() -> dict[str, list[int]]:
    """What the last step put on each link: bytes as sent, and in their own element type."""
    return {name: [link.payload_bytes, link.raw_bytes] for name, link in nb.last_report().links.items()}


def enter_own_folder(folder: str) -> str:
    """Work in a folder of this worker's own inside that one, as on a host of its own; gives one for checkpoints."""
    launched = attach()
    if launched is None:
        raise RuntimeError("this is not a worker of a launcher")
    own = Path(folder) / launched.worker
    own.mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    return "saved"
