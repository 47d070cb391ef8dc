"""`weights: own`: each cluster holds, saves and loads its own parts, and nothing of them crosses."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.processes.running import Ended, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Ended:
    found = run("own", 2, folder)
    found.result.check()
    return found


def test_a_process_holds_its_own_stages_and_no_more(pair: Ended) -> None:
    for told in pair.told.values():
        assert told["own"] > 30e6 and told["whole"] > 1.99 * told["own"]
        assert told["held"] <= 1.1 * told["own"]


def test_slots_of_what_is_elsewhere_are_never_there(pair: Ended) -> None:
    for told in pair.told.values():
        assert told["own slots"] <= told["slots before emptying"] <= 1.1 * told["own slots"]


def test_a_save_writes_each_clusters_part_and_nothing_crosses(pair: Ended, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["model.c0.weights.h5", "model.c1.weights.h5"]
    assert pair.all("crossed") == [[0], [0]]
    for own, other, name in (("first", "second", "c0"), ("second", "first", "c1")):
        path = folder / f"model.{name}.weights.h5"
        assert path.stat().st_size < 1.1 * pair.same("own")
        with h5py.File(path) as file:
            layers = {layer: file["layers"][key]["vars"] for layer, key in (("first", "dense"), ("second", "dense_1"))}
            assert np.all(np.isfinite(layers[own]["0"])) and np.all(np.isnan(layers[other]["0"]))
            assert layers[other]["0"].shape == (1600, 1600)
            assert name in file.attrs["whale_nebula"]


def test_loading_gives_each_its_own_back(pair: Ended) -> None:
    assert pair.same("trained on") is True
    assert pair.same("loaded") is True


def test_what_needs_the_whole_model_is_refused(pair: Ended) -> None:
    for told in pair.all("refusals"):
        assert len(told) == 3
        assert all(text.startswith("NB-303 no process may hold the whole model") for text in told)
        assert all("weights: everywhere" in text for text in told)
