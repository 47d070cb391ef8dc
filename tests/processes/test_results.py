"""Results and metrics are the same in every process, and those of the uncut model, whichever worker computes them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes.measuring import result_of
from tests.processes.running import beside
from tests.same import assert_same

EXTRAS, PLACES = ("regularizer", "add_loss", "output", "mask"), ("front", "middle", "last")
ALL = [case for case in itertools.product(EXTRAS, PLACES) if case != ("output", "last")]
SAMPLE = [("output", "front")]
DEADLINE = 280.0


def check(cases: list[tuple[str, str]], folder: Path, *, replicated: str = "", **options: Any) -> None:
    """Compare with the uncut models; the cluster whose stage is `replicated` has two workers."""
    deadline = options.pop("deadline", DEADLINE)
    counts = {f"c{number}": 1 + (place == replicated) for number, place in enumerate(PLACES)}
    workers = {f"{cluster}/{n}": cluster for cluster, count in counts.items() for n in range(count)}
    argv = ["results", json.dumps(cases), folder, replicated]

    def alone() -> dict[tuple[str, str], Any]:
        return {case: result_of(*case, cut=False, loggers=[]) for case in cases}

    found, uncut = beside("scenarios", workers, *argv, deadline=deadline, alone=alone, **options)
    found.result.check()
    for case, expected in uncut.items():
        for worker, told in found.told.items():
            assert list(told[" ".join(case)]) == list(expected), (case, worker)
            assert_same(expected, told[" ".join(case)], "processes")
    assert found.same("ahead") == {"feeding": 8.0, "fed": 24.0}


def test_results_are_those_of_the_uncut_model_in_every_process(tmp_path: Path) -> None:
    """Keras's loggers write each file once, and a stage that is given nothing back does not wait for results."""
    check(SAMPLE, tmp_path, gateways=True)
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert (header.split(",")[0], [row.split(",")[0] for row in rows]) == ("epoch", ["0", "1"])
    events = sorted(path.parent.name for path in (tmp_path / "events").rglob("*tfevents*"))
    assert events == ["train", "validation"]


@pytest.mark.grid
@pytest.mark.timeout(5 * DEADLINE)
@pytest.mark.parametrize("replicated", ["", *PLACES])
def test_results_of_every_combination(tmp_path: Path, replicated: str) -> None:
    check(ALL, tmp_path, replicated=replicated, deadline=4 * DEADLINE)
