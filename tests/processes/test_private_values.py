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
from tests.processes.translator import INPUTS, exercise_translator
from tests.processes.two_cluster_model import X, Y, build_model, fit, summarize_rows, to_hex, train_in_turn
from tests.processes.worker_reports import digest_tensors
from tests.processes.worker_runs import SEED, FinishedRun, run_scenarios

ELSEWHERE = "this result is on {}, not in this process"
Reports = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where weights are saved."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def runs_by_scenario(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Mapping[str, FinishedRun]:
    scenarios = {
        "looping": ["run_custom_loop", tmp_path_factory.mktemp("loop")],
        "moving": ["move_variables"],
        "owner": ["keep_results"],
        "sides": ["train_on_own_side"],
        "own": ["keep_weights", folder],
    }
    found = run_scenarios("scenarios", tmp_path_factory.mktemp("pair"), scenarios, gateways=True)
    found["own"].result.check()
    return found


@pytest.fixture(scope="module")
def own(runs_by_scenario: Mapping[str, FinishedRun]) -> FinishedRun:
    return runs_by_scenario["own"]


@pytest.fixture(scope="module")
def owner(runs_by_scenario: Mapping[str, FinishedRun]) -> FinishedRun:
    return runs_by_scenario["owner"]


@pytest.fixture(scope="module")
def sides(runs_by_scenario: Mapping[str, FinishedRun]) -> FinishedRun:
    return runs_by_scenario["sides"]


class TestLoops:
    """Models of a custom loop are read and saved like those of `fit`: by all processes together."""

    def test_init_keeps_the_random_state(self, runs_by_scenario: Mapping[str, FinishedRun]) -> None:
        assert runs_by_scenario["looping"].get_common("joining draws") is False

    def test_every_process_reads_the_whole_model(self, runs_by_scenario: Mapping[str, FinishedRun]) -> None:
        weights = runs_by_scenario["looping"].get_common("weights")
        assert runs_by_scenario["looping"].get_common("whole") == [*weights["first"], *weights["second"]]

    def test_cluster_that_reads_a_variable_gets_what_another_one_trained(
        self, runs_by_scenario: Mapping[str, FinishedRun]
    ) -> None:
        before, after, expected = runs_by_scenario["looping"].reports["c1/0"]["tied"]
        assert after == pytest.approx(expected, rel=1e-5) != before
        assert runs_by_scenario["looping"].reports["c1/0"]["followed"] is True

    def test_function_of_tensorflow_that_reads_a_variable_of_another_cluster_is_refused(
        self, runs_by_scenario: Mapping[str, FinishedRun]
    ) -> None:
        for text in runs_by_scenario["looping"].get_all("read in a function"):
            assert text.startswith("NB-303 variable"), text

    def test_read_after_a_step_inside_gathered_is_of_the_new_values(
        self, runs_by_scenario: Mapping[str, FinishedRun]
    ) -> None:
        inside, after = runs_by_scenario["looping"].get_common("trained inside gathered")
        assert inside == after != runs_by_scenario["looping"].get_common("whole")

    def test_programs_place_variables_in_other_clusters_in_turn(
        self, runs_by_scenario: Mapping[str, FinishedRun]
    ) -> None:
        nb.shutdown()
        keras.utils.set_random_seed(SEED)
        with nb.init(links="10gbit,0ms"):
            expected = train_in_turn()
        assert runs_by_scenario["moving"].get_common("moved") == expected
        both = ["c0/0", "c1/0"]  # the score in c0 reads what c1 has trained, which keeps its value
        assert runs_by_scenario["moving"].get_common("holders") == {"first/bias": both[:1], "second/bias": both[::-1]}

    def test_saved_files_have_the_whole_model(self, runs_by_scenario: Mapping[str, FinishedRun]) -> None:
        assert runs_by_scenario["looping"].get_common("saved") == [True, True, True]
        assert runs_by_scenario["looping"].get_common("one that no step uses") == 2

    def test_tf_checkpoint_is_written_by_the_lead_inside_gathered(
        self, runs_by_scenario: Mapping[str, FinishedRun]
    ) -> None:
        for text in runs_by_scenario["looping"].get_all("checkpoint"):
            assert text.startswith("NB-303 variable"), text
            assert "with nb.gathered(): around the read, in every process" in text
            assert "if nb.here().lead: checkpoint.save(path)" in text
        assert runs_by_scenario["looping"].reports["c1/0"]["here"] == 4
        assert runs_by_scenario["looping"].get_common("restored")[1] is True


class TestWeights:
    """Each cluster holds, saves and loads its own parts, which are not sent."""

    def test_process_holds_only_its_own_stages(self, own: FinishedRun) -> None:
        for report in own.reports.values():
            assert report["own"] > 30e6 and report["whole"] > 1.99 * report["own"]
            assert report["held"] <= 1.1 * report["own"]

    def test_slots_of_other_clusters_are_not_allocated(self, own: FinishedRun) -> None:
        for report in own.reports.values():
            assert report["own slots"] <= report["slots before emptying"] <= 1.1 * report["own slots"]

    def test_save_writes_a_file_for_each_cluster_and_sends_no_data(self, own: FinishedRun, folder: Path) -> None:
        assert sorted(path.name for path in folder.iterdir()) == ["model.c0.weights.h5", "model.c1.weights.h5"]
        assert own.get_all("crossed") == [[0], [0]]
        for mine, other, name in (("first", "second", "c0"), ("second", "first", "c1")):
            path = folder / f"model.{name}.weights.h5"
            assert path.stat().st_size < 1.1 * own.get_common("own")
            with h5py.File(path) as file:
                keys = (("first", "dense"), ("second", "dense_1"))
                layers = {layer: file["layers"][key]["vars"] for layer, key in keys}
                assert np.all(np.isfinite(layers[mine]["0"])) and np.all(np.isnan(layers[other]["0"]))
                assert layers[other]["0"].shape == (1600, 1600)
                assert name in file.attrs["whale_nebula"]

    def test_load_restores_the_weights_of_each_cluster(self, own: FinishedRun) -> None:
        assert own.get_common("trained on") is True
        assert own.get_common("loaded") is True

    def test_reads_of_the_whole_model_are_refused(self, own: FinishedRun) -> None:
        for report in own.get_all("refusals"):
            assert len(report) == 3
            assert all(text.startswith("NB-303 no process may gather the whole model") for text in report)
            assert all("weights: everywhere" in text for text in report)


@pytest.fixture(scope="module")
def reference_results() -> Reports:
    """The results of one process."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init(links="10gbit,0ms"):
        model = build_model()
        found: Reports = {"history": fit(model, epochs=1)}
        found["evaluate"] = to_hex(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True))
        found["predict"] = digest_tensors([model.predict(X, batch_size=12, verbose=0)])
        found["one batch"] = digest_tensors([model.predict_on_batch(X[:4])])
        found["function"] = {name: digest_tensors([value]) for name, value in summarize_rows(X[:7]).items()}
    return found


class TestResults:
    """Scalars are sent to every process; tensors stay in the cluster that computes them."""

    @pytest.mark.parametrize("part", ["history", "evaluate"])
    def test_scalars_are_in_every_process(self, owner: FinishedRun, reference_results: Reports, part: str) -> None:
        assert owner.get_common(part) == reference_results[part]

    @pytest.mark.parametrize("part", ["predict", "one batch"])
    def test_prediction_stays_in_the_cluster_of_the_last_stage(
        self, owner: FinishedRun, reference_results: Reports, part: str
    ) -> None:
        first, second = owner.get_all(part)
        assert first == ELSEWHERE.format("c1/0")
        assert second == reference_results[part]

    def test_function_tensors_stay_in_their_cluster(self, owner: FinishedRun, reference_results: Reports) -> None:
        first, second = owner.get_all("function")
        assert first == {**reference_results["function"], "high": ELSEWHERE.format("c1/0")}
        assert second == {**reference_results["function"], "doubled": ELSEWHERE.format("c0/0")}
        assert owner.get_all("said")[0]["high"] == "<float32[?] on c1/0>"

    def test_prediction_is_not_sent(self, owner: FinishedRun) -> None:
        assert [sent.get("c1->c0", 0) for sent in owner.get_all("sent")] == [0, 0]


@pytest.fixture(scope="module")
def reference_translations() -> Reports:
    """One process that reads everything."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init({"inputs": INPUTS}, links="10gbit,0ms"):
        return exercise_translator("both")


class TestInputs:
    """Each side of a text is read in its own cluster. `test_frame_contents` checks that no word of it is sent."""

    @pytest.mark.parametrize("part", ["arrays", "generator", "dataset", "evaluate", "batch", "weights"])
    def test_results_equal_those_of_one_process(
        self, sides: FinishedRun, reference_translations: Reports, part: str
    ) -> None:
        assert sides.get_common(part) == reference_translations[part]

    def test_function_scalars_are_shared_and_tensors_stay(
        self, sides: FinishedRun, reference_translations: Reports
    ) -> None:
        whole = {
            name: digest_tensors([np.asarray(value)]) for name, value in reference_translations["function"].items()
        }
        first, second = sides.get_all("function")
        assert second == whole
        assert first == {**whole, "each": ELSEWHERE.format("c1/0")}
        assert sides.get_all("predict")[1] == digest_tensors([reference_translations["predict"]])
