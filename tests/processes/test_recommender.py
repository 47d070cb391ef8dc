"""Tables of rows in one cluster, sharded over its workers, hot rows and the dense part in another: the bits of one
process, also after resumptions with other numbers of workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.worker_runs import Ended, run, told_alone
from tests.processes.workers import recommender

DEADLINE = 240.0
pytestmark = pytest.mark.timeout(4 * DEADLINE)
NEAR, FAR = ("table_near",), ("table0", "wide")
COUNTS = (1, 2, 3, 1)
"""The workers that have the tables, in one start after the other: `make test` makes the first two, and looks at the
second, which goes on from the first.
"""
SAMPLE = 2
Alone = dict[int, dict[str, Any]]
EPOCHS = [pytest.param(at, marks=() if at == SAMPLE - 1 else pytest.mark.grid) for at in range(len(COUNTS))]


def cluster_of(count: int) -> dict[str, str]:
    return {**{f"c0/{number}": "c0" for number in range(count)}, "c1/0": "c1"}


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return COUNTS if request.config.getoption("--grid") else COUNTS[:SAMPLE]


@pytest.fixture(scope="module")
def starts(counts: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """An epoch in each start."""
    folder: Path = tmp_path_factory.mktemp("run")
    pairs = enumerate(counts, start=1)
    return [run("recommender", cluster_of(count), folder, epochs, deadline=DEADLINE) for epochs, count in pairs]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Alone:
    """What one process comes to, in the epochs that tests look at."""
    looked = range(len(COUNTS)) if request.config.getoption("--grid") else [SAMPLE - 1]
    return {at: told_alone(recommender.lesson, at + 1, links="10gbit,0ms") for at in looked}


@pytest.mark.parametrize("at", EPOCHS)
def test_processes_train_the_model_of_one(starts: list[Ended], alone: Alone, at: int) -> None:
    assert starts[at].same("loss") == alone[at]["loss"]
    assert starts[at].same("predicted") == alone[at]["predicted"]
    assert all(starts[at].all("ahead"))


@pytest.mark.parametrize("at", EPOCHS)
def test_each_worker_of_a_stage_has_rows_of_its_own(starts: list[Ended], alone: Alone, at: int) -> None:
    assert_shared_out(starts[at], alone[at]["rows"])


def assert_shared_out(found: Ended, meant: dict[str, Any]) -> None:
    """Hot rows are near the dense part; all others are where tables are, each on one worker."""
    *far, near = found.all("rows")
    assert all(rows["table_near"] == {} for rows in far)
    assert near == {name: rows if name in NEAR else {} for name, rows in meant.items()}
    for name in FAR:
        parts = [rows[name] for rows in far]
        assert all(parts)
        assert sum(map(len, parts)) == len(meant[name])
        assert {key: row for part in parts for key, row in part.items()} == meant[name]


@pytest.mark.grid
def test_micro_batches_have_the_bits_of_one_process(tmp_path: Path) -> None:
    found = run("recommender", cluster_of(2), tmp_path, 1, 3, deadline=DEADLINE)
    meant = told_alone(recommender.lesson, 1, "", 3, links="10gbit,0ms")
    assert found.same("loss") == meant["loss"]
    assert_shared_out(found, meant["rows"])


def test_a_file_of_keras_is_refused(starts: list[Ended]) -> None:
    assert all("several processes is not implemented yet" in each for each in starts[-1].all("refused"))
