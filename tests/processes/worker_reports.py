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
from tests.parity_harness import Outcome
from whale_nebula.launch import attach

REPORT_PREFIX = "report: "
_PREFIX_CHARACTERS = "[]/ abcdefghijklmnopqrstuvwxyz0123456789"
"""The characters of a worker's name, as a launcher writes it before a line."""


def report_value(name: str, value: Any) -> None:
    """Print a value as a report."""
    print(REPORT_PREFIX + json.dumps([name, value]), flush=True)


def parse_reports(out: str) -> dict[str, Any]:
    """The reports of a worker, or of the workers of a cluster, whose names a launcher writes before their lines."""
    lines = (line.partition(REPORT_PREFIX) for line in out.splitlines())
    return dict(json.loads(value) for before, mark, value in lines if mark and not before.strip(_PREFIX_CHARACTERS))


def digest_tensors(tensors: Iterable[Any]) -> list[str]:
    """Dtype, shape and SHA-256 of each tensor, which are equal only for equal bits."""
    arrays = [np.ascontiguousarray(tensor) for tensor in tensors]
    return [f"{a.dtype}{list(a.shape)} {hashlib.sha256(a.tobytes()).hexdigest()}" for a in arrays]


def encode_outcome(outcome: Outcome) -> dict[str, Any]:
    """All results of a model of the zoo, exactly."""
    return {
        "losses": [float(loss).hex() for loss in outcome.losses],
        "history": {name: [float(v).hex() for v in values] for name, values in outcome.history.items()},
        "gradients": digest_tensors(outcome.gradients),
        "weights": digest_tensors(outcome.weights),
        "outputs": digest_tensors(outcome.outputs),
        "stages": list(outcome.stages),
    }


def count_sent_bytes() -> dict[str, list[int]]:
    """The bytes that the last step sent on each link, encoded and before encoding."""
    return {name: [link.payload_bytes, link.raw_bytes] for name, link in nb.last_report().links.items()}


def enter_worker_folder(folder: str) -> str:
    """Change to a folder of this worker, as on its own host; returns the folder for checkpoints."""
    launched = attach()
    if launched is None:
        raise RuntimeError("this is not a worker of a launcher")
    own = Path(folder) / launched.worker
    own.mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    return "saved"
