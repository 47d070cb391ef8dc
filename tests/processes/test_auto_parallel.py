"""`nb.auto_parallel` with few scopes or none: processes agree on a plan, and train a model too large for one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_workers, run_workers_and_reference
from tests.processes.workers.auto_parallel import (
    KIB,
    train_with_few_scopes,
    train_with_private_inputs,
    train_without_scopes,
)
from whale_nebula.hardware import ClusterInfo, Clusters, WorkerInfo
from whale_nebula.launch.link_advice import find_collectives_path
from whale_nebula.runtime.clusters import add_stored_measurements

REPLANNED = ("c1", "c1, c0: 2")
"""The plans: all in one cluster, then half of it in the other one, with micro-batches."""


@pytest.fixture(scope="module")
def planned_and_reference() -> tuple[FinishedRun, dict[str, Any]]:
    """Two clusters that have 1,500 KiB each, and the reference in one process with enough memory."""
    alone = partial(run_in_this_process, train_without_scopes, "1GiB", config={"measure": "0s"})
    return run_workers_and_reference("auto_parallel", 2, f"{KIB}KiB", alone=alone)


@pytest.fixture(scope="module")
def replanned(planned_and_reference: tuple[FinishedRun, dict[str, Any]]) -> FinishedRun:
    """The same model, planned again while it trains."""
    return run_workers("auto_parallel", 2, "1GiB", *REPLANNED, deadline=240)


def test_model_that_fits_runs_in_one_cluster(planned_and_reference: tuple[FinishedRun, dict[str, Any]]) -> None:
    _, alone = planned_and_reference
    assert list(alone["stages"].values()) == ["local"]


def test_processes_have_the_same_plan_of_two_clusters(
    planned_and_reference: tuple[FinishedRun, dict[str, Any]],
) -> None:
    found, _ = planned_and_reference
    assert sorted(found.get_common("stages").values()) == ["c0", "c1"]
    assert found.get_common("memory") <= KIB * 1024


def test_unknown_lines_are_measured_and_shared(planned_and_reference: tuple[FinishedRun, dict[str, Any]]) -> None:
    found, alone = planned_and_reference
    assert ["c0->c1" in each for each in found.get_common("lines")] == [True, False] and alone["lines"] == []


def test_unknown_collectives_are_measured_and_stored(tmp_path: Path) -> None:
    """A plan for two workers of one cluster: both get the same measurements, which are stored next to the config."""
    config = tmp_path / "clusters.yaml"
    config.write_text("measure: 1s\n")
    found = run_workers("auto_parallel", {"c0/0": "c0", "c0/1": "c0"}, "sums", config)
    (sums,) = found.get_common("sums")
    kinds = [each.split(":")[0] for each in found.get_common("kept")]
    assert sums.startswith("Inside c0 an all-reduce of 2: ") and "as measured on" in sums
    assert kinds == ["all-reduce of 2", "all-gather of 2", "all-to-all of 2"]
    kept = Clusters.load(find_collectives_path(config, "c0"))
    assert [str(each) for each in kept.cluster("c0").collectives] == found.get_common("kept")
    report = Clusters((ClusterInfo("c0", (WorkerInfo("c0/0"), WorkerInfo("c0/1"))),))
    assert add_stored_measurements(report, config).cluster("c0").ring.rate_bytes_per_s
    elsewhere = {name: replace(at, machine="another one") for name, at in kept.measured.items()}
    replace(kept, measured=elsewhere).save(find_collectives_path(config, "c0"))
    assert add_stored_measurements(report, config) == report


@pytest.mark.grid
def test_inputs_of_one_cluster_train_as_in_one_process() -> None:
    """Sentences and labels are in c0, which has too little memory for all layers; c1 has the middle layers."""
    alone = partial(run_in_this_process, train_with_private_inputs, "1GiB", config={"measure": "0s"})
    found, alone = run_workers_and_reference("auto_parallel", 2, "at_home", "1200KiB", alone=alone)
    for name in ("history", "evaluated"):
        np.testing.assert_allclose(*(tf.nest.flatten(report[name]) for report in (found.reports["c0/0"], alone)), 1e-5)


@pytest.mark.grid
def test_scopes_constrain_the_plan_in_every_process() -> None:
    found, alone = run_workers_and_reference(
        "auto_parallel",
        2,
        "scoped",
        alone=partial(run_in_this_process, train_with_few_scopes, "local", config={"measure": "0s"}),
    )
    assert found.get_common("scoped").items() >= {"c1": "c1"}.items() and "first" in found.get_common("scoped")
    assert alone["scoped"] == {"first": "local", "local": "local"}
    got, expected = map(tf.nest.flatten, (found.get_common("scoped history"), alone["scoped history"]))
    np.testing.assert_allclose(got, expected, 1e-5)


@pytest.mark.parametrize("key", ["untrained", "history", "evaluated", "weights"])
def test_planned_model_trains_as_in_one_process(
    planned_and_reference: tuple[FinishedRun, dict[str, Any]], key: str
) -> None:
    found, alone = planned_and_reference
    got, expected = (tf.nest.flatten(report) for report in (found.get_common(key), alone[key]))
    np.testing.assert_allclose(got, expected, 1e-5)


@pytest.mark.grid
def test_replanned_variables_leave_the_clusters_that_do_not_need_them(replanned: FinishedRun) -> None:
    assert replanned.get_common("frozen") == ["c0/0"]


@pytest.mark.grid
@pytest.mark.parametrize("key", ["history", "evaluated", "weights"])
def test_replanning_does_not_change_the_results(
    key: str, replanned: FinishedRun, planned_and_reference: tuple[FinishedRun, dict[str, Any]]
) -> None:
    assert replanned.get_common("ran") == list(REPLANNED) and list(replanned.get_common("last").values()) == [
        "c1",
        "c0",
    ]
    got, expected = (tf.nest.flatten(report) for report in (replanned.get_common(key), planned_and_reference[1][key]))
    np.testing.assert_allclose(got, expected, 1e-5)
