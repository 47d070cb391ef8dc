"""Two processes have the results of one: seeds, results, emptied variables, collective reads and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.processes.two_cluster_model import exercise_model
from tests.processes.worker_reports import digest_tensors
from tests.processes.worker_runs import SEED, FinishedRun, run_workers

pytestmark = pytest.mark.filterwarnings("ignore:.*saved without its scopes:whale_nebula.errors.NebulaWarning")
PARTS = ["initial", "history", "evaluate", "predict", "weights", "optimizer", "nested", "after the nested", "summary",
         "function", "loaded", "set"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(folder: Path) -> FinishedRun:
    found = run_workers("scenarios", 2, "report_held_variables", folder)
    found.result.check()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results in this process, with actors and the workers' seed."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init(links="10gbit,0ms"):
        return exercise_model(tmp_path_factory.mktemp("alone"))[1]


@pytest.mark.parametrize("part", PARTS)
def test_results_equal_those_of_one_process(pair: FinishedRun, reference: dict[str, Any], part: str) -> None:
    assert pair.get_common(part) == reference[part]


def test_training_changes_weights(reference: dict[str, Any]) -> None:
    assert reference["initial"] != reference["weights"]
    assert reference["set"] == reference["loaded"] == reference["weights"] == reference["nested"]


def test_here_describes_each_process(pair: FinishedRun) -> None:
    first, second = pair.get_all("here")
    assert first == {
        "cluster": "c0", "worker": "c0/0", "lead": False, "clusters": ["c0", "c1"], "alone": False, "epoch": 0,
        "runs_for": [], "runs": {"c0": True, "c1": False},
    }  # fmt: skip
    assert (second["cluster"], second["lead"], second["runs"]) == ("c1", True, {"c0": False, "c1": True})


def test_variables_of_other_clusters_are_empty(pair: FinishedRun) -> None:
    """These are parameters and optimizer slots; variables without an owner are in every process."""
    for mine, theirs, held in zip(("first", "second"), ("second", "first"), pair.get_all("held"), strict=True):
        foreign = {path: shape for path, shape in held.items() if theirs in path}
        assert len(foreign) == 2 * 3  # kernel and bias, and two slots of Adam for each
        assert set(map(tuple, foreign.values())) == {(1,)}
        assert len(held) - len(foreign) >= 2 * 3
        assert all(0 not in shape for path, shape in held.items() if mine in path)
        assert held["adam/iteration"] == held["adam/learning_rate"] == []


def test_reading_variables_of_other_clusters_is_refused(pair: FinishedRun) -> None:
    for home, report in zip(("c1/0", "c0/0"), pair.get_all("refusals"), strict=True):
        assert len(report) == 13
        for text in report:
            assert text.startswith("NB-303 variable"), text
            assert f"is on {home}, not in this process" in text
            assert "get_weights" in text


def test_saved_files_are_written_once(pair: FinishedRun, folder: Path) -> None:
    """When a save returns, every process sees the file, which is not written again."""
    for name, inode, changed in pair.get_common("saved"):
        state = (folder / name).stat()
        assert (state.st_ino, state.st_mtime_ns) == (inode, changed)
    assert sorted(path.name for path in folder.iterdir()) == ["model.keras", "model.weights.h5"]


def test_saved_file_has_the_whole_model(pair: FinishedRun, folder: Path) -> None:
    assert digest_tensors(keras.models.load_model(folder / "model.keras").get_weights()) == pair.get_common("weights")
