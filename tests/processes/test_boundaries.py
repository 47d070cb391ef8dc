"""Changes of a boundary during training, in two processes: at the same step, and as in one process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_scenarios
from tests.processes.workers import train
from whale_nebula.runtime.step import measurements

CLUSTERS = ("c0", "c1")
LINKS = "10gbit,0ms"


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FinishedRun]:
    """Programs, one after the other, in the same two processes."""
    grid = request.config.getoption("--grid")
    bases = ("learned", "svd") if grid else ()
    folder = tmp_path_factory.mktemp("pair")
    scenarios = {
        name: [name, *CLUSTERS]
        for name in (("train_delta_codec", "train_auto_codec") if grid else ("train_delta_codec",))
    }
    scenarios = {basis: ["train_projection", basis, *CLUSTERS] for basis in bases} | scenarios
    found = run_scenarios("train", folder, scenarios, gateways=True)
    found["train_delta_codec"].result.check()
    return found


@pytest.mark.grid
def test_codec_changes_and_skipped_steps_agree_between_processes(
    pair: Mapping[str, FinishedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_find_rate", "find_slowest_seconds"):  # as the worker sets them, and back again afterwards
        owner = measurements.LineRates if name == "_find_rate" else measurements
        monkeypatch.setattr(owner, name, getattr(owner, name))
    found, expected = pair["train_auto_codec"], run_in_this_process(train.train_auto_codec, *CLUSTERS, links=LINKS)
    for name in ("auto", "free again", "left out"):
        assert found.get_common(name) == expected[name]
    slow, free, out = (expected[name]["notes"] for name in ("auto", "free again", "left out"))
    assert any("b0 c0->c1: none -> int4" in notes for notes in slow)
    assert any("b0 c1->c0: int4 -> none" in notes for notes in free)
    said = "skipped: b0 c0->c1 contains a NaN or an infinity in micro-batch 1 of stage 'c0'"
    assert [said in notes for notes in out] == [False, True, False, False]
    for outcome in found.result.outcomes.values():
        assert said in outcome.err


def test_delta_codec_trains_as_in_one_process(pair: Mapping[str, FinishedRun]) -> None:
    """Both hold the same bits."""
    found, expected = pair["train_delta_codec"], run_in_this_process(train.train_delta_codec, *CLUSTERS)
    for name in ("losses", "outputs", "weights"):
        assert found.get_common(name) == expected[name]
    assert found.get_common("begun") == [[8, [1, 1]]], "tensors of the last step are admitted in its size"
    here, there = expected["held"]
    assert here == there and found.get_common("held") == [here]
    there, back = ("c0->c1", "c1->c0")
    first, second = found.get_all("sent")
    assert [step[there] for step in first] == [step[there] for step in expected["sent"]]
    assert [step[back] for step in second] == [step[back] for step in expected["sent"]]
    epochs = [sum(step[there][0] for step in first[each : each + 3]) for each in (0, 3, 6)]
    assert epochs[1] == epochs[2] < epochs[0] / 2


@pytest.mark.grid
@pytest.mark.parametrize("basis", ["learned", "svd"])
def test_projection_basis_trains_as_in_one_process(pair: Mapping[str, FinishedRun], basis: str) -> None:
    """Each has one of the variables."""
    found, expected = pair[basis], run_in_this_process(train.train_projection, basis, *CLUSTERS, links=LINKS)
    for name in ("losses", "outputs", "names", "weights"):
        assert found.get_common(name) == expected[name]
    assert found.get_common("names")[:2] == ["boundary/bottleneck_c0_down", "boundary/bottleneck_c0_c1_up"]
    sent = {link: count for part in found.get_all("sent") for link, count in part.items() if count[0]}
    assert sent == expected["sent"]
