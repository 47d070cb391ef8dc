"""Keras's callbacks that write files, in two processes: one writes, and interrupted training continues. No stage waits
for results of one to which it gives nothing back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.processes.worker_runs import Ended, several

NAMES = ["latest.weights.h5", "training_metadata.json"]
OWN = ["latest.c0.weights.h5", "latest.c1.weights.h5", "training_metadata.json"]
HOW = ("everywhere", "own")
"""Where weights are kept."""
pytestmark = pytest.mark.grid  # of one process `tests/scripts` tries these callbacks, of several checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the training whose weights are kept everywhere."""
    return tmp_path_factory.mktemp("everywhere")


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    folders = dict(zip(HOW, (folder, tmp_path_factory.mktemp("own")), strict=True))
    asked = {weights: ["backing", where, weights] for weights, where in folders.items()}
    asked["ahead"] = ["ahead", tmp_path_factory.mktemp("ahead")]
    found = several("scenarios", tmp_path_factory.mktemp("pair"), asked)
    found["own"].result.check()
    return found


@pytest.mark.parametrize("how", HOW)
def test_a_training_that_was_broken_off_goes_on(runs: Mapping[str, Ended], how: str) -> None:
    unbroken = runs[how].same("unbroken")
    assert runs[how].same("begun again") == {name: values[1:] for name, values in unbroken.items()}


@pytest.mark.parametrize(("how", "files"), [("everywhere", NAMES), ("own", OWN)])
def test_one_process_writes_the_backup_and_removes_it_at_the_end(
    runs: Mapping[str, Ended], how: str, files: list[str]
) -> None:
    assert runs[how].same("files") == files and runs[how].same("gone") is True


def test_one_that_is_kept_keeps_the_one_before(runs: Mapping[str, Ended]) -> None:
    assert runs["everywhere"].same("kept") == sorted([*NAMES, *(f"{name}.bkp" for name in NAMES)])


def test_all_may_make_the_folder_of_a_checkpoint(runs: Mapping[str, Ended]) -> None:
    assert runs["everywhere"].same("each") == ["1", "2", "3"]


def test_loggers_write_each_file_once(runs: Mapping[str, Ended], folder: Path) -> None:
    header, *rows = (folder / "log.csv").read_text().splitlines()
    assert (header.split(",")[0], [row.split(",")[0] for row in rows]) == ("epoch", ["0", "1", "2"])
    assert [path.parent.name for path in (folder / "events").rglob("*tfevents*")] == ["train"]


def test_a_stage_that_is_given_nothing_back_does_not_wait_for_results(runs: Mapping[str, Ended]) -> None:
    assert runs["ahead"].same("ahead") == {"feeding": 8.0, "fed": 24.0}
