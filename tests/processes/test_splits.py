"""Split stages whose devices are processes, each holding its shards: the results of the uncut model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.parity.splits import MODELS, Split
from tests.parity.test_shared_slots import train
from tests.processes.worker_runs import Ended, ended, started
from tests.processes.workers.train import BEFORE, kept, large, small, stored
from tests.same import Cut, Outcome, assert_same

DEADLINE = 600.0
pytestmark = pytest.mark.timeout(DEADLINE)
TWO = {"c0/0": "c0", "c0/1": "c0"}
GRID = [
    "classifier,2,2,2",
    "translator,2,2,2",
    "sibling experts,2,1,1",
    "words,2,1,1",
    "classifier,2,1,4",
    "pictures,2,2,1",
    "tied,2,1,1",
    "dropping,2,1,1",
    "words by Adam,2,1,1",
    "experts,2,2,1",
    "experts,2,1,4",
    "experts,2,2,2",
    "siblings,2,1,1",
]
TOO_MANY = "tied,3,1,1"
FOUR = {f"c0/{number}": "c0" for number in range(4)}
MESH_GRID = ["tied,2,1,2,2", "experts,2,2,2,2+2", "classifier,2,2,2,2+2", "translator,2,2,4,2+2", "experts,2,1,2,2"]
CROWDED = "tied,3,1,2,2"
LENGTH = 1e-2 * 6
Found = tuple[Ended, Mapping[str, Outcome], dict[str, Any]]


def asked(config: pytest.Config, *, mesh: bool = False) -> list[str]:
    """The grid, or none: `kept`, `large` and, of a mesh, `stored` train models of their own."""
    if not config.getoption("--grid", default=False):
        return []
    return MESH_GRID if mesh else GRID


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"case", "mesh_case"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, MESH_GRID if name == "mesh_case" else GRID)


def uncut(cases: Sequence[str]) -> Mapping[str, Outcome]:
    """What is expected of them."""
    nb.shutdown()
    return {case: MODELS[case.partition(",")[0]](Split(Cut(0), 0)) for case in cases}


def compare(run: Ended, expected: Mapping[str, Outcome], case: str) -> None:
    """What every process told of a case."""
    plain = expected[case]
    for part in run.all(case):
        got = Outcome(part["losses"], part["history"], weights=part["weights"], gradients=plain.gradients)
        assert_same(plain, got, "processes", LENGTH)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All of them in one run of two workers; and uncut in this process meanwhile."""
    cases, folder, own = asked(request.config), *(tmp_path_factory.mktemp(name) for name in ("home", "alone"))
    with started("train", TWO, "at_home", folder, *cases, TOO_MANY, deadline=DEADLINE) as job:
        expected = uncut(cases)
        plain = kept(own)
        plain |= {how: large(how)[1] for how in BEFORE}
        found = ended(job, DEADLINE)
    model, *_ = small()
    for name, path in {"plain": own / "kept.weights.h5", "own": folder / "kept.c0.weights.h5"}.items():
        model.load_weights(path)
        plain[name] = model.get_weights()
    yield found, expected, plain


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """Those with replicas of two devices, in one run of four workers; and uncut meanwhile."""
    cases, folder, own = asked(request.config, mesh=True), *(tmp_path_factory.mktemp(name) for name in ("mesh", "own"))
    with started("train", FOUR, "meshed", folder, *cases, CROWDED, deadline=DEADLINE) as job:
        expected = uncut(cases)
        plain = stored(own)
        found = ended(job, DEADLINE)
    plain["file"] = keras.models.load_model(folder / "mesh.keras").get_weights()
    yield found, expected, plain


@pytest.mark.grid
def test_every_process_ends_with_the_uncut_model(two: Found, case: str) -> None:
    compare(*two[:2], case)


def test_a_cluster_keeps_the_pieces_of_its_workers_in_a_file(two: Found) -> None:
    """With `weights: own`: the first worker writes what all of them have, and all of them load it. So of slots."""
    run, _, plain = two
    assert_same(plain.pop("plain"), plain.pop("own"), "processes", LENGTH)
    plain = {key: plain[key] for key in ("predicted", "further")}
    assert_same(plain, run.same("kept"), "processes", LENGTH)
    assert_same(plain, run.same("slots kept"), "processes", LENGTH)


def test_replicas_of_a_cluster_hold_parts_of_slots(two: Found) -> None:
    first, second = two[0].all("slots")
    sizes = [np.prod(first[path]) + np.prod(second[path]) for path in first]
    assert {6 * 10, 10 * 7} <= set(sizes), (first, second)


@pytest.mark.parametrize("how", BEFORE)
def test_a_large_variable_has_no_value_before_it_is_read(two: Found, how: str) -> None:
    """Of a variable made under nb.split each worker draws its piece alone: those of the uncut model."""
    run, _, plain = two
    undrawn, got = run.same(f"large {how}")
    assert undrawn == [True, True, *[how == "planned"] * 2]
    assert_same(plain[how], got, "processes", LENGTH)


@pytest.mark.grid
def test_a_worker_holds_its_pieces(two: Found) -> None:
    """Of 19 classes the first has ten, with the moments of Adam; of a bias as many."""
    first, second = two[0].all("pieces")
    assert first.keys() == second.keys()
    tables = [path for path, shape in first.items() if 10 in shape]
    assert sum("momentum" in path for path in tables) >= 2
    assert all(9 in second[path] for path in tables)


def test_a_piece_is_not_read_for_the_whole(two: Found) -> None:
    assert "nb.split has divided it: c0/0, c0/1 each have a piece" in two[0].same("read")


@pytest.mark.grid
def test_reads_of_many_pieces_are_not_told_as_retracing(two: Found) -> None:
    assert two[0].same("retracing") == []


def test_devices_need_a_worker_each(two: Found) -> None:
    """So experts never span a line between clusters."""
    assert "nb.split needs 3 devices, but cluster 'c0' has 2" in two[0].same(TOO_MANY)


@pytest.mark.grid
def test_replicas_of_several_devices_end_with_the_uncut_model(four: Found, mesh_case: str) -> None:
    compare(*four[:2], mesh_case)


def test_each_replica_has_all_pieces(four: Found) -> None:
    first, second, *others = four[0].all("pieces")
    assert others == [first, second]
    assert [10, 4] in first.values() and [10, 3] in second.values()


def test_a_model_on_a_mesh_is_stored_and_used_as_one(four: Found) -> None:
    """`save_weights`, `save`, `load_weights`, `get_weights`, `evaluate`, `predict`; then it trains on."""
    run, _, plain = four
    found = run.same("stored")
    assert all(found["loaded"])
    assert_same(plain, {**found, "file": [np.asarray(each) for each in found["weights"]]}, "processes", LENGTH)


@pytest.mark.grid
def test_a_model_on_a_mesh_is_verified(four: Found) -> None:
    for text in four[0].all("verified"):
        assert "tensors match the uncut step" in text, text


def test_replicas_need_a_worker_for_each_device(four: Found) -> None:
    assert "nb.split needs 3 devices in each of 2 replicas, but cluster 'c0' has 4" in four[0].same(CROWDED)


SHARED = [
    "adamw,optimizer",
    "rows,gradients",
    "plain,gradients",
    "scaled,optimizer",
    "lamb,optimizer",
    "sgd,gradients",
    "adafactor,gradients",
]


@pytest.mark.grid
def test_replicas_that_hold_parts_train_as_one_whose_slots_are_whole() -> None:
    """With a norm over all gradients, with rows of a table, and with other optimizers."""
    with started("train", TWO, "sharing", *SHARED, deadline=DEADLINE) as job:
        expected = {case: train(case.partition(",")[0], 0) for case in SHARED}
        found = ended(job, DEADLINE)
    for case, plain in expected.items():
        got = found.same(case)
        assert_same(plain.weights, got["weights"], "processes", LENGTH)
        assert_same(plain.history, got["history"], "processes", LENGTH)
    first, second = found.all("slots")
    kernels = [path for path in first if "dense" in path and len(first[path]) == 2 and first[path][1] == 10]
    assert len(kernels) >= 2
    assert all(first[path][0] + second[path][0] in (7, 28) for path in kernels)
