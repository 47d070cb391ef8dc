"""Tables of rows in one process, hot rows and the dense part in another: the bits of one, also after a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.running import Ended, run, told_alone
from tests.processes.workers import recommending

NEAR, FAR = ("table_near",), ("table0", "wide")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two epochs, of which the second is trained by processes that were started again."""
    folder: Path = tmp_path_factory.mktemp("run")
    run("recommending", 2, folder, 1).result.check()
    return run("recommending", 2, folder, 2)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return told_alone(recommending.lesson, 2, links="10gbit,0ms")


def test_two_processes_train_the_model_of_one(pair: Ended, alone: dict[str, Any]) -> None:
    assert pair.same("loss") == alone["loss"]
    assert pair.same("predicted") == alone["predicted"]


def test_the_process_of_the_stage_holds_the_rows(pair: Ended, alone: dict[str, Any]) -> None:
    """Hot rows are near the dense part; all others are where tables are."""
    near, far = ({name: rows * (name in held) for name, rows in alone["rows"].items()} for held in (NEAR, FAR))
    assert all(alone["rows"].values())
    assert pair.all("rows") == [far, near]
    assert all(pair.all("ahead"))
    there, here = pair.all("bits")
    assert [here[0], *there[1:]] == alone["bits"]


def test_a_file_of_keras_is_refused(pair: Ended) -> None:
    assert all("several processes is not built yet" in each for each in pair.all("refused"))
