"""Tables of rows in one cluster, sharded over its workers, hot rows and the dense part in another: the bits of one
process, also after resumptions with other numbers of workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_workers
from tests.processes.workers import recommender

DEADLINE = 240.0
pytestmark = pytest.mark.timeout(4 * DEADLINE)
NEAR, FAR = ("table_near",), ("table0", "wide")
COUNTS = (1, 2, 3, 1)
"""The numbers of workers with tables in consecutive starts; `make test` runs the first two, and checks the second,
which resumes from the first.
"""
SAMPLE = 2
References = dict[int, dict[str, Any]]
EPOCHS = [pytest.param(at, marks=() if at == SAMPLE - 1 else pytest.mark.grid) for at in range(len(COUNTS))]


def name_workers(count: int) -> dict[str, str]:
    return {**{f"c0/{number}": "c0" for number in range(count)}, "c1/0": "c1"}


@pytest.fixture(scope="module")
def worker_counts(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return COUNTS if request.config.getoption("--grid") else COUNTS[:SAMPLE]


@pytest.fixture(scope="module")
def starts(worker_counts: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> list[FinishedRun]:
    """An epoch in each start."""
    folder: Path = tmp_path_factory.mktemp("run")
    pairs = enumerate(worker_counts, start=1)
    return [
        run_workers("recommender", name_workers(count), folder, epochs, deadline=DEADLINE) for epochs, count in pairs
    ]


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> References:
    """The results of one process after the checked epochs."""
    looked = range(len(COUNTS)) if request.config.getoption("--grid") else [SAMPLE - 1]
    return {at: run_in_this_process(recommender.train_model, at + 1, links="10gbit,0ms") for at in looked}


@pytest.mark.parametrize("at", EPOCHS)
def test_processes_train_as_one_process(starts: list[FinishedRun], references: References, at: int) -> None:
    assert starts[at].get_common("loss") == references[at]["loss"]
    assert all(starts[at].get_all("ahead"))


@pytest.mark.parametrize("at", EPOCHS)
def test_table_rows_are_divided_among_workers(starts: list[FinishedRun], references: References, at: int) -> None:
    assert_rows_divided(starts[at], references[at]["rows"])


def assert_rows_divided(found: FinishedRun, expected: dict[str, Any]) -> None:
    """Assert that hot rows are with the dense part, and each other row is on one worker with tables."""
    *far, near = found.get_all("rows")
    assert all(rows["table_near"] == {} for rows in far)
    assert near == {name: rows if name in NEAR else {} for name, rows in expected.items()}
    for name in FAR:
        parts = [rows[name] for rows in far]
        assert all(parts)
        assert sum(map(len, parts)) == len(expected[name])
        assert {key: row for part in parts for key, row in part.items()} == expected[name]


@pytest.mark.grid
def test_micro_batches_train_as_in_one_process(tmp_path: Path) -> None:
    found = run_workers("recommender", name_workers(2), tmp_path, 1, 3, deadline=DEADLINE)
    expected = run_in_this_process(recommender.train_model, 1, "", 3, links="10gbit,0ms")
    assert found.get_common("loss") == expected["loss"]
    assert_rows_divided(found, expected["rows"])


def test_save_weights_is_refused_in_several_processes(starts: list[FinishedRun]) -> None:
    assert all("several processes is not implemented yet" in each for each in starts[-1].get_all("refused"))
