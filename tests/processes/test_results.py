"""Results and metrics are the same in every process, and those of the uncut model, wherever they are made."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes.running import Ended, run

EXTRAS, PLACES = ("regularizer", "add_loss", "output", "mask"), ("front", "middle", "last")
ALL = [case for case in itertools.product(EXTRAS, PLACES) if case != ("output", "last")]
SAMPLE = [("regularizer", "front"), ("add_loss", "middle"), ("output", "front"), ("mask", "last")]


def compare(found: Any, expected: Any, path: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for name in expected:
            compare(found[name], expected[name], f"{path}/{name}")
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=path)


def check(ended: Ended, cases: list[tuple[str, str]]) -> None:
    ended.result.check()
    for extra, place in cases:
        for worker, told in ended.told.items():
            one = told[f"{extra} {place}"]
            compare(one["cut"], one["uncut"], f"{extra} {place} in {worker}")


def test_results_are_those_of_the_uncut_model_in_every_process(tmp_path: Path) -> None:
    """And Keras's loggers write each file once."""
    check(run("results", 3, json.dumps(SAMPLE), tmp_path, gateways=True), SAMPLE)
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert (header.split(",")[0], [row.split(",")[0] for row in rows]) == ("epoch", ["0", "1"])
    events = sorted(path.parent.name for path in (tmp_path / "events").rglob("*tfevents*"))
    assert events == ["train", "validation"]


@pytest.mark.grid
def test_results_of_every_combination(tmp_path: Path) -> None:
    check(run("results", 3, json.dumps(ALL), tmp_path), ALL)
