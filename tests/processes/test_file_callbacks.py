"""Keras's callbacks that write files, in two processes: one writes, and interrupted training continues. No stage waits
for results that it does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.processes.worker_runs import FinishedRun, run_scenarios

NAMES = ["latest.weights.h5", "training_metadata.json"]
OWN = ["latest.c0.weights.h5", "latest.c1.weights.h5", "training_metadata.json"]
WEIGHTS = ("everywhere", "own")
"""The values of `weights`."""
pytestmark = pytest.mark.grid  # `tests/scripts` tests these callbacks in one process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the training with `weights: everywhere`."""
    return tmp_path_factory.mktemp("everywhere")


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FinishedRun]:
    folders = dict(zip(WEIGHTS, (folder, tmp_path_factory.mktemp("own")), strict=True))
    scenarios = {weights: ["run_file_callbacks", where, weights] for weights, where in folders.items()}
    scenarios["ahead"] = ["run_ahead", tmp_path_factory.mktemp("ahead")]
    found = run_scenarios("scenarios", tmp_path_factory.mktemp("pair"), scenarios)
    found["own"].result.check()
    return found


@pytest.mark.parametrize("weight_location", WEIGHTS)
def test_backup_resumes_interrupted_training(runs: Mapping[str, FinishedRun], weight_location: str) -> None:
    unbroken = runs[weight_location].get_common("unbroken")
    assert runs[weight_location].get_common("begun again") == {name: values[1:] for name, values in unbroken.items()}


@pytest.mark.parametrize(("weight_location", "files"), [("everywhere", NAMES), ("own", OWN)])
def test_backup_is_written_by_one_process_and_removed(
    runs: Mapping[str, FinishedRun], weight_location: str, files: list[str]
) -> None:
    assert runs[weight_location].get_common("files") == files and runs[weight_location].get_common("gone") is True


def test_kept_backup_keeps_the_previous_one(runs: Mapping[str, FinishedRun]) -> None:
    assert runs["everywhere"].get_common("kept") == sorted([*NAMES, *(f"{name}.bkp" for name in NAMES)])


def test_model_checkpoint_creates_its_folders(runs: Mapping[str, FinishedRun]) -> None:
    assert runs["everywhere"].get_common("each") == ["1", "2", "3"]


def test_loggers_write_each_file_once(runs: Mapping[str, FinishedRun], folder: Path) -> None:
    header, *rows = (folder / "log.csv").read_text().splitlines()
    assert (header.split(",")[0], [row.split(",")[0] for row in rows]) == ("epoch", ["0", "1", "2"])
    assert [path.parent.name for path in (folder / "events").rglob("*tfevents*")] == ["train"]
    assert len(list((folder / "events").rglob("keras_embedding*"))) == len(rows)


def test_stage_without_incoming_gradients_does_not_wait(runs: Mapping[str, FinishedRun]) -> None:
    assert runs["ahead"].get_common("ahead") == {"feeding": 8.0, "fed": 24.0}
