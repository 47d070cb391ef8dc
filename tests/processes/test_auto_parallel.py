"""`nb.auto_parallel` with few scopes or none: processes plan alike, and train a model too large for one cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.processes.running import Ended, beside, run, told_alone
from tests.processes.workers.planned import KIB, at_home, lesson, scoped
from whale_nebula.hardware import ClusterInfo, Clusters, WorkerInfo
from whale_nebula.launch.link_advice import find_collectives_path
from whale_nebula.runtime.clusters import add_kept

ANEW = ("c1", "c1, c0: 2")
"""All is in one cluster, then half of it goes to the other one, and the batch is cut."""


@pytest.fixture(scope="module")
def both() -> tuple[Ended, dict[str, Any]]:
    """Two clusters that have 1,500 KiB each, and meanwhile one that has enough."""
    alone = partial(told_alone, lesson, "1GiB", config={"measure": "0s"})
    return beside("planned", 2, f"{KIB}KiB", alone=alone)


@pytest.fixture(scope="module")
def anew(both: tuple[Ended, dict[str, Any]]) -> Ended:
    """The same, planned anew again and again as it trains."""
    return run("planned", 2, "1GiB", *ANEW, deadline=240)


def test_one_cluster_does_all_where_it_can(both: tuple[Ended, dict[str, Any]]) -> None:
    _, alone = both
    assert list(alone["stages"].values()) == ["local"]


def test_every_process_has_the_same_plan_of_two_clusters(both: tuple[Ended, dict[str, Any]]) -> None:
    found, _ = both
    assert sorted(found.same("stages").values()) == ["c0", "c1"]
    assert found.same("memory") <= KIB * 1024


def test_lines_that_nobody_has_said_are_measured_and_shared(both: tuple[Ended, dict[str, Any]]) -> None:
    found, alone = both
    assert ["c0->c1" in each for each in found.same("lines")] == [True, False] and alone["lines"] == []


def test_collectives_that_nobody_has_said_are_measured_and_kept(tmp_path: Path) -> None:
    """By a plan of two workers of one cluster; both have the same numbers, and the config's folder has them."""
    config = tmp_path / "clusters.yaml"
    config.write_text("measure: 1s\n")
    found = run("planned", {"c0/0": "c0", "c0/1": "c0"}, "sums", config)
    (sums,) = found.same("sums")
    kinds = [each.split(":")[0] for each in found.same("kept")]
    assert sums.startswith("Inside c0 an all-reduce of 2: ") and "as measured on" in sums
    assert kinds == ["all-reduce of 2", "all-gather of 2", "all-to-all of 2"]
    kept = Clusters.load(find_collectives_path(config, "c0"))
    assert [str(each) for each in kept.cluster("c0").collectives] == found.same("kept")
    told = Clusters((ClusterInfo("c0", (WorkerInfo("c0/0"), WorkerInfo("c0/1"))),))
    assert add_kept(told, config).cluster("c0").ring.rate_bytes_per_s
    elsewhere = {name: replace(at, machine="another one") for name, at in kept.measured.items()}
    replace(kept, measured=elsewhere).save(find_collectives_path(config, "c0"))
    assert add_kept(told, config) == told


@pytest.mark.grid
def test_inputs_that_one_cluster_has_are_read_there_alone() -> None:
    """Sentences and labels are in c0, which has no memory for all layers: c1 has those between, and reads neither."""
    alone = partial(told_alone, at_home, "1GiB", config={"measure": "0s"})
    found, alone = beside("planned", 2, "at_home", "1200KiB", alone=alone)
    for name in ("history", "evaluated"):
        np.testing.assert_allclose(*(tf.nest.flatten(told[name]) for told in (found.told["c0/0"], alone)), 1e-5)


@pytest.mark.grid
def test_what_scopes_say_holds_in_every_process() -> None:
    found, alone = beside("planned", 2, "scoped", alone=partial(told_alone, scoped, "local", config={"measure": "0s"}))
    assert found.same("scoped").items() >= {"c1": "c1"}.items() and "first" in found.same("scoped")
    assert alone["scoped"] == {"first": "local", "local": "local"}
    got, expected = map(tf.nest.flatten, (found.same("scoped history"), alone["scoped history"]))
    np.testing.assert_allclose(got, expected, 1e-5)


@pytest.mark.parametrize("what", ["history", "evaluated", "predicted", "weights"])
def test_it_trains_as_the_uncut_model(both: tuple[Ended, dict[str, Any]], what: str) -> None:
    found, alone = both
    got, expected = (tf.nest.flatten(told) for told in (found.same(what), alone[what]))
    np.testing.assert_allclose(got, expected, 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("what", ["history", "evaluated", "predicted", "weights"])
def test_numbers_stay_where_weights_and_slots_move(what: str, anew: Ended, both: tuple[Ended, dict[str, Any]]) -> None:
    assert anew.same("ran") == list(ANEW) and list(anew.same("last").values()) == ["c1", "c0"]
    got, expected = (tf.nest.flatten(told) for told in (anew.same(what), both[1][what]))
    np.testing.assert_allclose(got, expected, 1e-5)
