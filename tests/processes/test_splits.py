"""Split stages whose devices are processes: the uncut model, each holding its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

import whale_nebula as nb
from tests.parity.splits import MODELS, Split
from tests.parity.test_shared_slots import train
from tests.processes.running import Ended, ended, started
from tests.same import Cut, Outcome, assert_same

DEADLINE = 600.0
pytestmark = pytest.mark.timeout(DEADLINE)
TWO = {"c0/0": "c0", "c0/1": "c0"}
SAMPLE = ["translator,2,2,2", "siblings,2,1,1"]
GRID = [*SAMPLE, "classifier,2,1,4", "pictures,2,2,1", "tied,2,1,1", "dropping,2,1,1", "experts,2,2,1"]
TOO_MANY = "experts,3,1,1"
LENGTH = 1e-2 * 6


def asked(config: pytest.Config) -> list[str]:
    """The sample, or the grid."""
    return GRID if config.getoption("--grid", default=False) else SAMPLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", asked(metafunc.config))


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Ended, Mapping[str, Outcome]]]:
    """All of them in one run of two workers; and uncut in this process meanwhile."""
    cases = asked(request.config)
    with started("train", TWO, "divided", *cases, TOO_MANY, deadline=DEADLINE) as job:
        nb.shutdown()
        expected = {case: MODELS[case.partition(",")[0]](Split(Cut(0), 0)) for case in cases}
        found = ended(job, DEADLINE)
    yield found, expected


def test_every_process_ends_with_the_uncut_model(two: tuple[Ended, Mapping[str, Outcome]], case: str) -> None:
    found, plain = two[0].all(case), two[1][case]
    for part in found:
        got = Outcome(part["losses"], part["history"], weights=part["weights"], gradients=plain.gradients)
        assert_same(plain, got, "processes", LENGTH)


def test_a_worker_holds_its_pieces(two: tuple[Ended, Mapping[str, Outcome]]) -> None:
    """Of 19 words the first has ten, with the moments of Adam; of a bias as many."""
    first, second = two[0].all("pieces")
    assert first.keys() == second.keys()
    tables = [path for path, shape in first.items() if 10 in shape]
    assert sum("momentum" in path for path in tables) >= 2
    assert all(9 in second[path] for path in tables)


def test_a_piece_is_not_read_for_the_whole(two: tuple[Ended, Mapping[str, Outcome]]) -> None:
    assert "nb.split has divided it: c0/0, c0/1 have a piece each" in two[0].same("read")


def test_devices_need_a_worker_each(two: tuple[Ended, Mapping[str, Outcome]]) -> None:
    """So experts never span a line between clusters."""
    assert "nb.split says 3 devices, and cluster 'c0' has 2" in two[0].same(TOO_MANY)


def test_replicas_hold_parts_of_slots() -> None:
    """And train as one whose slots are whole, with a norm over all gradients, and with one for each weight."""
    with started("train", TWO, "sharing", "adamw", "lamb", deadline=DEADLINE) as job:
        expected = {name: train(name, 0).weights for name in ("adamw", "lamb")}
        found = ended(job, DEADLINE)
    for name, weights in expected.items():
        assert_same(weights, found.same(name), "processes", LENGTH)
    first, second = found.all("slots")
    kernels = [path for path in first if "dense" in path and len(first[path]) == 2 and first[path][1] == 10]
    assert len(kernels) >= 2
    assert all(first[path][0] + second[path][0] == 7 for path in kernels)
