"""Changes of a boundary during training, in two processes: at the same step, and as in one process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.processes.running import Ended, several, told_alone
from tests.processes.workers import train
from whale_nebula.runtime.step import measurements

CLUSTERS = ("c0", "c1")
LINKS = "10gbit,0ms"


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """Programs, one after the other, in the same two processes."""
    grid = request.config.getoption("--grid")
    bases = ("learned", "svd") if grid else ("learned",)
    folder = tmp_path_factory.mktemp("pair")
    asked = {name: [name, *CLUSTERS] for name in (("differences", "choosing") if grid else ("differences",))}
    asked = {basis: ["projected", basis, *CLUSTERS] for basis in bases} | asked
    found = several("train", folder, asked, gateways=True)
    found["differences"].result.check()
    return found


@pytest.mark.grid
def test_both_sides_change_and_leave_out_at_the_same_step(
    pair: Mapping[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_find_rate", "find_slowest_seconds"):  # as the worker sets them, and back again afterwards
        owner = measurements.LineRates if name == "_find_rate" else measurements
        monkeypatch.setattr(owner, name, getattr(owner, name))
    found, expected = pair["choosing"], told_alone(train.choosing, *CLUSTERS, links=LINKS)
    for name in ("auto", "free again", "left out"):
        assert found.same(name) == expected[name]
    slow, free, out = (expected[name]["notes"] for name in ("auto", "free again", "left out"))
    assert any("b0 c0->c1: none -> int4" in notes for notes in slow)
    assert any("b0 c1->c0: int4 -> none" in notes for notes in free)
    said = "skipped: b0 c0->c1 contains a NaN or an infinity in micro-batch 1 of stage 'c0'"
    assert [said in notes for notes in out] == [False, True, False, False]
    for outcome in found.result.outcomes.values():
        assert said in outcome.err


def test_two_processes_hold_the_same_samples_and_train_as_one_does(pair: Mapping[str, Ended]) -> None:
    """Both hold the same bits."""
    found, expected = pair["differences"], told_alone(train.differences, *CLUSTERS)
    for name in ("losses", "outputs", "weights"):
        assert found.same(name) == expected[name]
    here, there = expected["held"]
    assert here == there and found.same("held") == [here]
    there, back = ("c0->c1", "c1->c0")
    first, second = found.all("sent")
    assert [step[there] for step in first] == [step[there] for step in expected["sent"]]
    assert [step[back] for step in second] == [step[back] for step in expected["sent"]]
    epochs = [sum(step[there][0] for step in first[each : each + 3]) for each in (0, 3, 6)]
    assert epochs[1] == epochs[2] < epochs[0] / 2


@pytest.mark.parametrize("basis", ["learned", pytest.param("svd", marks=pytest.mark.grid)])
def test_two_processes_train_the_basis_that_one_does(pair: Mapping[str, Ended], basis: str) -> None:
    """Each has one of the variables."""
    found, expected = pair[basis], told_alone(train.projected, basis, *CLUSTERS, links=LINKS)
    for name in ("losses", "outputs", "names", "weights"):
        assert found.same(name) == expected[name]
    assert found.same("names")[:2] == ["boundary/bottleneck_c0_down", "boundary/bottleneck_c0_c1_up"]
    sent = {link: count for part in found.all("sent") for link, count in part.items() if count[0]}
    assert sent == expected["sent"]
