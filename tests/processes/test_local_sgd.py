"""Local SGD between processes: all end with the weights of one process, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from tests import momenta
from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_workers, start_training, wait_for_run
from tests.processes.workers import train
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL
from whale_nebula.runtime.local_sgd.one_bit_collectives import MemberRounds
from whale_nebula.strategies import OneBitAdam

DEADLINE = 300.0
pytestmark = pytest.mark.timeout(DEADLINE)
MEMBERS_STEPS = 2 * momenta.FREEZE
THREE = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
WAYS = ("sync", "async", "1bit", "auto")
SAMPLE = ("async",)
"""Without `--grid`; the 1-bit exchange is covered by `members` below."""


@pytest.fixture(scope="module")
def three_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A cluster of two workers and one of a single one."""
    folder, ways = tmp_path_factory.mktemp("apart"), WAYS if request.config.getoption("--grid") else SAMPLE
    return run_workers("train", THREE, "train_local_sgd", folder, *ways, deadline=DEADLINE)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two clusters of one worker each."""
    return run_workers("train", 2, "train_local_sgd", tmp_path_factory.mktemp("apart"), "sync", "each", "1bit")


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in SAMPLE else pytest.mark.grid) for way in WAYS])
class TestThreeWorkers:
    def test_workers_end_with_equal_weights(self, three_workers: FinishedRun, way: str) -> None:
        assert three_workers.get_common(f"{way} weights")

    def test_losses_differ_by_cluster_and_validation_agrees(self, three_workers: FinishedRun, way: str) -> None:
        first, mate, other = three_workers.get_all(f"{way} losses")
        assert first == mate != other
        for own, theirs in zip(
            three_workers.get_all(f"{way} validation")[0], three_workers.get_all(f"{way} validation")[2], strict=True
        ):
            assert own == pytest.approx(theirs, rel=1e-5)

    def test_report_lists_the_other_clusters(self, three_workers: FinishedRun, way: str) -> None:
        assert three_workers.get_all(f"{way} meetings") == [[["c1"], 8], [["c1"], 8], [["c0"], 8]]

    def test_saved_weights_are_loaded_by_all_workers(self, three_workers: FinishedRun, way: str) -> None:
        assert three_workers.get_common(f"{way} loaded") is True
        assert three_workers.get_common(f"{way} restored") is True


@pytest.mark.grid
def test_auto_interval_is_the_same_in_all_workers(three_workers: FinishedRun) -> None:
    assert "chosen by sync_every='auto': an exchange takes" in three_workers.get_common("auto chosen")


def test_first_worker_of_the_last_cluster_leads(three_workers: FinishedRun) -> None:
    assert three_workers.get_all("lead") == [False, False, True]


def test_custom_loop_starts_from_the_first_workers_weights(three_workers: FinishedRun) -> None:
    missing = 1.0  # of the weight to be 1; a step on n rows of ones takes 0.2 n of it away
    for _ in range(2):
        missing *= 2 / 3 * (1 - 0.2 * 4) ** 2 + 1 / 3 * (1 - 0.2 * 2) ** 2  # two workers have two thirds of the rows
    assert float.fromhex(three_workers.get_common("loop")) == pytest.approx(1.0 - missing, rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("way", ["sync", "each", "1bit"])
def test_two_processes_train_as_one(two_workers: FinishedRun, way: str) -> None:
    here = run_in_this_process(train.train_model_by_local_sgd, way, config={"clusters": {"c0": {}, "c1": {}}})
    assert json.loads(json.dumps(here[f"{way} weights"])) == two_workers.get_common(f"{way} weights")
    assert here[f"{way} losses"] == two_workers.get_all(f"{way} losses")[0]
    assert here[f"{way} validation"] == two_workers.get_common(f"{way} validation")


@pytest.mark.grid
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_one_worker_ends_all(ends: signal.Signals, tmp_path: Path) -> None:
    with start_training(2, "train_local_sgd", tmp_path, "endless", steps=15) as job:
        job.signal("c1/0", ends)
        found = wait_for_run(job)
    if ends is signal.SIGTERM:
        assert found.result.codes == {"c0/0": EXIT_TEMPFAIL, "c1/0": EXIT_TEMPFAIL}
        assert found.get_common("steps") % 10 == 0
    else:
        assert found.result.culprit == "c1/0"
        assert "worker 'c1/0' is gone" in found.result.outcomes["c0/0"].err


@pytest.fixture(scope="module")
def members(request: pytest.FixtureRequest) -> FinishedRun:
    """Three workers of one cluster."""
    kinds = [*train.HAS_SERVERS] if request.config.getoption("--grid") else ["adam"]
    return run_workers("train", {f"c0/{n}": "c0" for n in range(3)}, "train_momentum_exchange", MEMBERS_STEPS, *kinds)


@pytest.mark.parametrize("kind", ["adam", pytest.param("lamb", marks=pytest.mark.grid)])
def test_momentum_exchange_matches_the_reference(members: FinishedRun, kind: str) -> None:
    momenta.check_steps(kind, 3, members.get_common(f"{kind} weights"), servers=train.HAS_SERVERS[kind])


def test_sent_bytes_match_the_plan(members: FinishedRun) -> None:
    """Control messages contain step numbers, so sizes may differ by a few bytes."""
    (warm, after), peers = MemberRounds.count_bytes(OneBitAdam(servers=True), [30, 10], 3), 2
    crossed = members.get_all("adam crossed")[0]
    assert crossed[2] - crossed[-1] == pytest.approx(peers * (warm - after), abs=16)
    plan = members.reports["c0/0"]["plan"]
    assert f"each worker sends each other worker {warm} B of momenta, by all-to-all, then all-gather" in plan
    assert f"in each later step {after} B, by all-to-all, then all-gather" in plan


def test_wrong_replica_count_is_refused(members: FinishedRun) -> None:
    assert "nb.replica(5, exchange='1bit') in a cluster of 3 workers" in members.get_common("refused")


def test_layer_averages_cover_all_workers(members: FinishedRun) -> None:
    np.testing.assert_allclose(members.get_common("mean"), 0.01 * momenta.read_rows(0)[0].mean(0), rtol=1e-5)


def test_workers_exit_without_error(three_workers: FinishedRun) -> None:
    assert set(three_workers.result.codes.values()) == {0}
