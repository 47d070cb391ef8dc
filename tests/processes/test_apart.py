"""Local SGD between processes: all end with the same bits, those of one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from tests import momenta
from tests.processes.running import Ended, ended, run, told_alone, training
from tests.processes.workers import train
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL
from whale_nebula.runtime.local_sgd.members import MemberRounds
from whale_nebula.strategies import OneBitAdam

DEADLINE = 300.0
pytestmark = pytest.mark.timeout(DEADLINE)
MEMBERS_STEPS = 2 * momenta.FREEZE
THREE = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
WAYS = ("sync", "async", "1bit", "auto")
SAMPLE = ("async",)
"""The workers of a cluster exchange in one bit below, and meet as those of `sync` do."""


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A cluster of two workers and one of a single one."""
    folder, ways = tmp_path_factory.mktemp("apart"), WAYS if request.config.getoption("--grid") else SAMPLE
    return run("train", THREE, "apart", folder, *ways, deadline=DEADLINE)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two clusters of one worker each."""
    return run("train", 2, "apart", tmp_path_factory.mktemp("apart"), "sync", "each", "1bit")


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in SAMPLE else pytest.mark.grid) for way in WAYS])
class TestThreeWorkers:
    def test_all_end_with_the_same_bits(self, three: Ended, way: str) -> None:
        assert three.same(f"{way} weights")

    def test_each_cluster_tells_its_own_losses_and_all_the_same_validation(self, three: Ended, way: str) -> None:
        first, mate, other = three.all(f"{way} losses")
        assert first == mate != other
        for own, theirs in zip(three.all(f"{way} validation")[0], three.all(f"{way} validation")[2], strict=True):
            assert own == pytest.approx(theirs, rel=1e-5)

    def test_it_says_whom_it_met(self, three: Ended, way: str) -> None:
        assert three.all(f"{way} meetings") == [[["c1"], 8], [["c1"], 8], [["c0"], 8]]

    def test_what_was_saved_is_loaded_by_all(self, three: Ended, way: str) -> None:
        assert three.same(f"{way} loaded") is True


@pytest.mark.grid
def test_all_choose_the_same_interval_from_what_all_have_measured(three: Ended) -> None:
    assert "chosen by sync_every='auto': an exchange takes" in three.same("auto chosen")


def test_a_custom_loop_begins_with_the_first_ones_weights(three: Ended) -> None:
    missing = 1.0  # of the weight to be 1; a step on n rows of ones takes 0.2 n of it away
    for _ in range(2):
        missing *= 2 / 3 * (1 - 0.2 * 4) ** 2 + 1 / 3 * (1 - 0.2 * 2) ** 2  # two workers have two thirds of the rows
    assert float.fromhex(three.same("loop")) == pytest.approx(1.0 - missing, rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("way", ["sync", "each", "1bit"])
def test_two_processes_leave_what_one_leaves(two: Ended, way: str) -> None:
    here = told_alone(train.trained_apart, way, config={"clusters": {"c0": {}, "c1": {}}})
    assert json.loads(json.dumps(here[f"{way} weights"])) == two.same(f"{way} weights")
    assert here[f"{way} losses"] == two.all(f"{way} losses")[0]


@pytest.mark.grid
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_ends_ends_all(ends: signal.Signals, tmp_path: Path) -> None:
    with training(2, "apart", tmp_path, "endless", steps=15) as job:
        job.signal("c1/0", ends)
        found = ended(job)
    if ends is signal.SIGTERM:
        assert found.result.codes == {"c0/0": EXIT_TEMPFAIL, "c1/0": EXIT_TEMPFAIL}
        assert found.same("steps") % 10 == 0
    else:
        assert found.result.culprit == "c1/0"
        assert "worker 'c1/0' is gone" in found.result.outcomes["c0/0"].err


@pytest.fixture(scope="module")
def members(request: pytest.FixtureRequest) -> Ended:
    """Three workers of one cluster."""
    kinds = [*train.MEMBERS] if request.config.getoption("--grid") else ["adam"]
    return run("train", {f"c0/{n}": "c0" for n in range(3)}, "members", MEMBERS_STEPS, *kinds)


@pytest.mark.parametrize("kind", ["adam", pytest.param("lamb", marks=pytest.mark.grid)])
def test_workers_of_a_cluster_exchange_momenta_as_the_algorithm_says(members: Ended, kind: str) -> None:
    momenta.check_steps(kind, 3, members.same(f"{kind} weights"), servers=train.MEMBERS[kind])


def test_workers_send_the_bytes_that_the_plan_says(members: Ended) -> None:
    """With what goes over links, whose control messages count their steps."""
    (warm, after), peers = MemberRounds.count_bytes(OneBitAdam(servers=True), [30, 10], 3), 2
    crossed = members.all("adam crossed")[0]
    assert crossed[2] - crossed[-1] == pytest.approx(peers * (warm - after), abs=16)
    plan = members.told["c0/0"]["plan"]
    assert f"each worker sends each other worker {warm} B of momenta, by all-to-all, then all-gather" in plan
    assert f"in each later step {after} B, by all-to-all, then all-gather" in plan


def test_a_count_of_copies_is_that_of_the_workers(members: Ended) -> None:
    assert "nb.replica(5, exchange='1bit') in a cluster of 3 workers" in members.same("refused")


def test_averages_of_layers_are_those_of_all_workers(members: Ended) -> None:
    np.testing.assert_allclose(members.same("mean"), 0.01 * momenta.rows_of(0)[0].mean(0), rtol=1e-5)


def test_nobody_is_left(three: Ended) -> None:
    assert set(three.result.codes.values()) == {0}
