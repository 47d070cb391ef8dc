"""Split stages whose devices are processes, each holding its shards: the results of the uncut model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.parity.split_models import MODELS, Split
from tests.parity.test_sharded_updates import train
from tests.parity_harness import Cut, Outcome, assert_same
from tests.processes.worker_runs import FinishedRun, start_workers, wait_for_run
from tests.processes.workers.train import (
    EARLY_USES,
    save_and_use,
    save_own_weights,
    train_large_variables,
    train_small_model,
)

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
MESH_GRID = [
    "tied,2,1,2,2",
    "experts,2,2,2,2+2",
    "classifier,2,2,2,2+2",
    "translator,2,2,4,2+2",
    "experts,2,1,2,2",
    "normalized,2,1,2,2",
]
TOO_MANY_ON_MESH = "tied,3,1,2,2"
LENGTH = 1e-2 * 6
Found = tuple[FinishedRun, Mapping[str, Outcome], dict[str, Any]]


def list_cases(config: pytest.Config, *, mesh: bool = False) -> list[str]:
    """The cases of the grid; none without `--grid`, because other scenarios of the workers train models as well."""
    if not config.getoption("--grid", default=False):
        return []
    return MESH_GRID if mesh else GRID


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"case", "mesh_case"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, MESH_GRID if name == "mesh_case" else GRID)


def run_uncut_models(cases: Sequence[str]) -> Mapping[str, Outcome]:
    """The outcomes of these cases without scopes."""
    nb.shutdown()
    return {case: MODELS[case.partition(",")[0]](Split(Cut(0), 0)) for case in cases}


def compare_case(run: FinishedRun, expected: Mapping[str, Outcome], case: str) -> None:
    """Compare the reports of every process on a case."""
    plain = expected[case]
    for part in run.get_all(case):
        got = Outcome(part["losses"], part["history"], weights=part["weights"], gradients=plain.gradients)
        assert_same(plain, got, "processes", LENGTH)


@pytest.fixture(scope="module")
def two_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All cases in one run of two workers, and uncut in this process meanwhile."""
    cases, folder, own = list_cases(request.config), *(tmp_path_factory.mktemp(name) for name in ("home", "alone"))
    with start_workers("train", TWO, "train_with_own_weights", folder, *cases, TOO_MANY, deadline=DEADLINE) as job:
        expected = run_uncut_models(cases)
        plain = save_own_weights(own)
        plain |= {how: train_large_variables(how)[1] for how in (EARLY_USES if cases else ["planned"])}
        found = wait_for_run(job, DEADLINE)
    model, *_ = train_small_model()
    for name, path in {"plain": own / "kept.weights.h5", "own": folder / "kept.c0.weights.h5"}.items():
        model.load_weights(path)
        plain[name] = model.get_weights()
    yield found, expected, plain


@pytest.fixture(scope="module")
def four_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """Cases with replicas of two devices in one run of four workers, and uncut in this process meanwhile."""
    cases, folder, own = (
        list_cases(request.config, mesh=True),
        *(tmp_path_factory.mktemp(name) for name in ("mesh", "own")),
    )
    with start_workers("train", FOUR, "train_mesh", folder, *cases, TOO_MANY_ON_MESH, deadline=DEADLINE) as job:
        expected = run_uncut_models(cases)
        plain = save_and_use(own)
        found = wait_for_run(job, DEADLINE)
    plain["file"] = keras.models.load_model(folder / "mesh.keras").get_weights()
    yield found, expected, plain


@pytest.mark.grid
def test_processes_end_with_the_uncut_model(two_workers: Found, case: str) -> None:
    compare_case(*two_workers[:2], case)


def test_cluster_file_restores_pieces_and_slots(two_workers: Found) -> None:
    """With `weights: own`, the first worker writes the pieces of all workers, which load them; the same for slots."""
    run, _, plain = two_workers
    assert_same(plain.pop("plain"), plain.pop("own"), "processes", LENGTH)
    plain = {key: plain[key] for key in ("predicted", "further")}
    assert_same(plain, run.get_common("kept"), "processes", LENGTH)
    assert_same(plain, run.get_common("slots kept"), "processes", LENGTH)


def test_replicas_hold_parts_of_slots(two_workers: Found) -> None:
    first, second = two_workers[0].get_all("slots")
    sizes = [np.prod(first[path]) + np.prod(second[path]) for path in first]
    assert {6 * 10, 10 * 7} <= set(sizes), (first, second)


@pytest.mark.parametrize("how", ["planned", pytest.param("used", marks=pytest.mark.grid)])
def test_large_variable_is_not_drawn_before_it_is_read(two_workers: Found, how: str) -> None:
    """Each worker draws only its piece of a variable under nb.split, with the values of the uncut model."""
    run, _, plain = two_workers
    undrawn, got = run.get_common(f"large {how}")
    assert undrawn == [True, True, *[how == "planned"] * 2]
    assert_same(plain[how], got, "processes", LENGTH)


@pytest.mark.grid
def test_worker_holds_only_its_pieces(two_workers: Found) -> None:
    """Of 19 classes the first worker has ten, with the moments of Adam."""
    first, second = two_workers[0].get_all("pieces")
    assert first.keys() == second.keys()
    tables = [path for path, shape in first.items() if 10 in shape]
    assert sum("momentum" in path for path in tables) >= 2
    assert all(9 in second[path] for path in tables)


def test_read_of_a_piece_is_refused(two_workers: Found) -> None:
    assert "nb.split has divided it: c0/0, c0/1 each have a piece" in two_workers[0].get_common("read")


@pytest.mark.grid
def test_reads_of_many_pieces_cause_no_retracing_warning(two_workers: Found) -> None:
    assert two_workers[0].get_common("retracing") == []


def test_more_devices_than_workers_are_refused(two_workers: Found) -> None:
    """Therefore experts never span clusters."""
    assert "nb.split needs 3 devices, but cluster 'c0' has 2" in two_workers[0].get_common(TOO_MANY)


@pytest.mark.grid
def test_mesh_ends_with_the_uncut_model(four_workers: Found, mesh_case: str) -> None:
    compare_case(*four_workers[:2], mesh_case)


@pytest.mark.grid
def test_mesh_replicas_hold_all_pieces(four_workers: Found) -> None:
    first, second, *others = four_workers[0].get_all("pieces")
    assert others == [first, second]
    assert [10, 4] in first.values() and [10, 3] in second.values()


@pytest.mark.grid
def test_mesh_model_is_saved_loaded_and_used(four_workers: Found) -> None:
    """`save_weights`, `save`, `load_weights`, `get_weights`, `evaluate`, `predict`; then it trains on."""
    run, _, plain = four_workers
    found = run.get_common("stored")
    assert all(found["loaded"])
    assert_same(plain, {**found, "file": [np.asarray(each) for each in found["weights"]]}, "processes", LENGTH)


@pytest.mark.grid
def test_mesh_model_is_verified(four_workers: Found) -> None:
    for text in four_workers[0].get_all("verified"):
        assert "tensors match the uncut step" in text, text


@pytest.mark.grid
def test_more_mesh_devices_than_workers_are_refused(four_workers: Found) -> None:
    assert "nb.split needs 3 devices in each of 2 replicas, but cluster 'c0' has 4" in four_workers[0].get_common(
        TOO_MANY_ON_MESH
    )


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
def test_sharded_optimizers_train_as_whole_ones() -> None:
    """With a norm over all gradients, with rows of a table, and with other optimizers."""
    with start_workers("train", TWO, "train_sharded_slots", *SHARED, deadline=DEADLINE) as job:
        expected = {case: train(case.partition(",")[0], 0) for case in SHARED}
        found = wait_for_run(job, DEADLINE)
    for case, plain in expected.items():
        got = found.get_common(case)
        assert_same(plain.weights, got["weights"], "processes", LENGTH)
        assert_same(plain.history, got["history"], "processes", LENGTH)
    first, second = found.get_all("slots")
    kernels = [path for path in first if "dense" in path and len(first[path]) == 2 and first[path][1] == 10]
    assert len(kernels) >= 2
    assert all(first[path][0] + second[path][0] in (7, 28) for path in kernels)
