"""Private values stay in their cluster: weights (`weights: own`), results (`results: owner`), and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.processes.translator import INPUTS, course
from tests.processes.two_cluster_model import X, Y, fit, hexed, measured, taught
from tests.processes.worker_reports import bits
from tests.processes.worker_runs import SEED, Ended, several

ELSEWHERE = "this result is on {}, not in this process"
Told = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where weights are saved."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Mapping[str, Ended]:
    asked = {"looping": ["looping", tmp_path_factory.mktemp("loop")], "owner": ["owner"], "sides": ["sides"],
             "own": ["own", folder]}  # fmt: skip
    found = several("scenarios", tmp_path_factory.mktemp("pair"), asked, gateways=True)
    found["own"].result.check()
    return found


@pytest.fixture(scope="module")
def own(pair: Mapping[str, Ended]) -> Ended:
    return pair["own"]


@pytest.fixture(scope="module")
def owner(pair: Mapping[str, Ended]) -> Ended:
    return pair["owner"]


@pytest.fixture(scope="module")
def sides(pair: Mapping[str, Ended]) -> Ended:
    return pair["sides"]


class TestLoops:
    """Models of a custom loop are read and saved as one that fits is: by all processes together."""

    def test_joining_leaves_the_numbers_of_the_script_alone(self, pair: Mapping[str, Ended]) -> None:
        assert pair["looping"].same("joining draws") is False

    def test_all_get_the_whole_model(self, pair: Mapping[str, Ended]) -> None:
        weights = pair["looping"].same("weights")
        assert pair["looping"].same("whole") == [*weights["first"], *weights["second"]]

    def test_files_hold_it(self, pair: Mapping[str, Ended]) -> None:
        assert pair["looping"].same("saved") == [True, True, True]
        assert pair["looping"].same("one that no step uses") == 2

    def test_a_checkpoint_is_written_by_one_while_all_hold_the_model(self, pair: Mapping[str, Ended]) -> None:
        for text in pair["looping"].all("checkpoint"):
            assert text.startswith("NB-303 variable"), text
            assert "with nb.gathered(): around the read, in every process" in text
            assert "if nb.here().lead: checkpoint.save(path)" in text
        assert pair["looping"].told["c1/0"]["here"] == 4
        assert pair["looping"].same("restored")[1] is True


class TestWeights:
    """Each cluster holds, saves and loads its own parts, and nothing of them crosses."""

    def test_a_process_holds_its_own_stages_and_no_more(self, own: Ended) -> None:
        for told in own.told.values():
            assert told["own"] > 30e6 and told["whole"] > 1.99 * told["own"]
            assert told["held"] <= 1.1 * told["own"]

    def test_slots_of_what_is_elsewhere_are_never_there(self, own: Ended) -> None:
        for told in own.told.values():
            assert told["own slots"] <= told["slots before emptying"] <= 1.1 * told["own slots"]

    def test_a_save_writes_each_clusters_part_and_nothing_crosses(self, own: Ended, folder: Path) -> None:
        assert sorted(path.name for path in folder.iterdir()) == ["model.c0.weights.h5", "model.c1.weights.h5"]
        assert own.all("crossed") == [[0], [0]]
        for mine, other, name in (("first", "second", "c0"), ("second", "first", "c1")):
            path = folder / f"model.{name}.weights.h5"
            assert path.stat().st_size < 1.1 * own.same("own")
            with h5py.File(path) as file:
                keys = (("first", "dense"), ("second", "dense_1"))
                layers = {layer: file["layers"][key]["vars"] for layer, key in keys}
                assert np.all(np.isfinite(layers[mine]["0"])) and np.all(np.isnan(layers[other]["0"]))
                assert layers[other]["0"].shape == (1600, 1600)
                assert name in file.attrs["whale_nebula"]

    def test_loading_gives_each_its_own_back(self, own: Ended) -> None:
        assert own.same("trained on") is True
        assert own.same("loaded") is True

    def test_what_needs_the_whole_model_is_refused(self, own: Ended) -> None:
        for told in own.all("refusals"):
            assert len(told) == 3
            assert all(text.startswith("NB-303 no process may gather the whole model") for text in told)
            assert all("weights: everywhere" in text for text in told)


@pytest.fixture(scope="module")
def taught_alone() -> Told:
    """What one process comes to."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init(links="10gbit,0ms"):
        model = taught()
        found: Told = {"history": fit(model, epochs=1)}
        found["evaluate"] = hexed(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True))
        found["predict"] = bits([model.predict(X, batch_size=12, verbose=0)])
        found["one batch"] = bits([model.predict_on_batch(X[:4])])
        found["function"] = {name: bits([value]) for name, value in measured(X[:7]).items()}
    return found


class TestResults:
    """Numbers go everywhere, tensors stay in the cluster that makes them."""

    @pytest.mark.parametrize("part", ["history", "evaluate"])
    def test_numbers_go_everywhere(self, owner: Ended, taught_alone: Told, part: str) -> None:
        assert owner.same(part) == taught_alone[part]

    @pytest.mark.parametrize("part", ["predict", "one batch"])
    def test_a_prediction_stays_with_the_last_stage(self, owner: Ended, taught_alone: Told, part: str) -> None:
        first, second = owner.all(part)
        assert first == ELSEWHERE.format("c1/0")
        assert second == taught_alone[part]

    def test_each_tensor_of_a_function_stays_where_it_is_made(self, owner: Ended, taught_alone: Told) -> None:
        first, second = owner.all("function")
        assert first == {**taught_alone["function"], "high": ELSEWHERE.format("c1/0")}
        assert second == {**taught_alone["function"], "doubled": ELSEWHERE.format("c0/0")}
        assert owner.all("said")[0]["high"] == "<float32[?] on c1/0>"

    def test_no_prediction_crosses_the_line(self, owner: Ended) -> None:
        assert [sent.get("c1->c0", 0) for sent in owner.all("sent")] == [0, 0]


@pytest.fixture(scope="module")
def read_alone() -> Told:
    """One process that reads everything."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init({"inputs": INPUTS}, links="10gbit,0ms"):
        return course("both")


class TestInputs:
    """Each side of a text is read in its own cluster; that no word of it is sent, `test_frame_contents` checks."""

    @pytest.mark.parametrize("part", ["arrays", "generator", "dataset", "evaluate", "batch", "weights"])
    def test_each_side_by_itself_comes_to_what_one_process_comes_to(
        self, sides: Ended, read_alone: Told, part: str
    ) -> None:
        assert sides.same(part) == read_alone[part]

    def test_numbers_of_one_side_go_everywhere_and_tensors_stay(self, sides: Ended, read_alone: Told) -> None:
        whole = {name: bits([np.asarray(value)]) for name, value in read_alone["function"].items()}
        first, second = sides.all("function")
        assert second == whole
        assert first == {**whole, "each": ELSEWHERE.format("c1/0")}
        assert sides.all("predict")[1] == bits([read_alone["predict"]])
