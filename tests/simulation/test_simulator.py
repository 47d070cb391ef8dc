"""Simulated runs: a sample of the cases of `python -m tests.soak.simulated`, and tests of the judge itself."""

import random
from collections import Counter

import numpy as np
import pytest

from tests.simulation import case as cases
from tests.simulation.case import (
    PATIENCE,
    REACHABLE_POINTS,
    Case,
    CaseResult,
    find_violations,
    generate_grid,
    make_random_case,
)
from tests.simulation.simulator import DETECTION_SECONDS, simulate
from tests.soak.simulated import describe_failure, main
from whale_nebula.errors import OptionError
from whale_nebula.faults import POINTS, Action
from whale_nebula.transport import peer
from whale_nebula.wire import frame

SAMPLE, SEED = 100, 20_260_101
RECOVERABLE_FAULTS = ["cut:5", "reset", "duplicate", "reorder", "corrupt", "truncate", "replay", "silence:5"]


def simulate_valid(text: str) -> CaseResult:
    result = simulate(Case.parse(text))
    assert result.wrong == [], describe_failure(result)
    return result


def list_errors(result: CaseResult) -> dict[str, str]:
    return {worker: str(each.error) for worker, each in result.outcomes.items() if each.error is not None}


def test_sample_of_the_grid_has_no_violations() -> None:
    """`python -m tests.soak.simulated` runs all of it."""
    violating = [
        result for case in random.Random(SEED).sample(list(generate_grid()), SAMPLE) if (result := simulate(case)).wrong
    ]
    assert not violating, "\n".join(map(describe_failure, violating))


def test_sample_of_random_cases_has_no_violations() -> None:
    violating = [result for seed in range(SAMPLE // 2) if (result := simulate(make_random_case(SEED + seed))).wrong]
    assert not violating, "\n".join(map(describe_failure, violating))


@pytest.mark.parametrize("workers", [2, 3])
def test_undisturbed_run_reaches_every_failpoint_without_waiting(workers: int) -> None:
    result = simulate_valid(f"seed=3 workers={workers} steps=3")
    assert result.is_complete and result.seconds < 1.0
    disturbed = simulate_valid("seed=3 lines=gpu/0>npu/0=cut:1@9").reached
    assert {*result.reached, *disturbed} == set(REACHABLE_POINTS)
    unreachable_points = {name for name in set(POINTS) - set(REACHABLE_POINTS) if not name.startswith("checkpoint.")}
    assert unreachable_points == {"certificate.changed", "certificate.renewed", "failure.telling"}


def test_same_case_gives_the_same_run() -> None:
    text = "seed=11 workers=3 steps=3 lines=gpu/0>npu/0=corrupt@9,npu/0>tpu/0=cut:2@14"
    runs = [simulate_valid(text) for _ in range(2)]
    assert runs[0].reached == runs[1].reached and runs[0].seconds == runs[1].seconds


@pytest.mark.parametrize("line_fault", RECOVERABLE_FAULTS)
def test_recoverable_line_fault_does_not_change_the_result(line_fault: str) -> None:
    kind, _, seconds = line_fault.partition(":")
    for number in (8, 13):
        result = simulate_valid(
            f"seed={number} steps=4 lines=gpu/0>npu/0={kind}{':' * bool(seconds)}{seconds}@{number}"
        )
        assert result.is_complete and len(result.applied_faults) == 1


def test_killed_worker_is_named_by_its_peers_within_two_seconds() -> None:
    result = simulate_valid("seed=2 workers=3 faults=npu/0:update.begun=kill@2")
    assert set(list_errors(result)) == {"gpu/0", "tpu/0"}
    assert all("worker 'npu/0' is gone" in text for text in list_errors(result).values())
    assert result.outcomes["gpu/0"].ended_at <= DETECTION_SECONDS + 1.0


def test_failed_worker_reports_its_error_to_its_peers() -> None:
    result = simulate_valid("seed=2 faults=npu/0:update.before=raise@2")
    assert (
        "worker 'npu/0' failed" in list_errors(result)["gpu/0"]
        and "update.before=raise@2" in list_errors(result)["gpu/0"]
    )
    assert result.seconds < PATIENCE


def test_restarted_worker_is_refused_as_another_process() -> None:
    result = simulate_valid("seed=2 faults=npu/0:update.begun=kill@2 restart=0.5")
    assert "NB-414" in list_errors(result)["gpu/0"]


def test_silence_beyond_patience_ends_all_workers() -> None:
    result = simulate_valid(f"seed=2 lines=gpu/0>npu/0=silence:{3 * PATIENCE:g}@9")
    assert len(list_errors(result)) == 2 and "'gpu/0'" in list_errors(result)["npu/0"]


def test_briefly_frozen_worker_does_not_change_the_result() -> None:
    assert simulate_valid("seed=2 faults=npu/0:update.begun=freeze:6@2").is_complete


def test_grid_has_every_failpoint_worker_and_action() -> None:
    faults_in_grid = Counter((f.point, f.worker, f.action) for case in generate_grid() for f in case.faults)
    kills = {(point, worker, Action.KILL) for point in REACHABLE_POINTS for worker in ("gpu/0", "npu/0")}
    assert kills <= faults_in_grid.keys() and sum(faults_in_grid.values()) > 600


def test_simulation_restores_patched_modules() -> None:
    import threading
    import time

    simulate_valid("seed=1 faults=npu/0:step.announced=kill@2")
    assert peer.threading is threading and peer.time is time and frame.CHUNK_BYTES == 1 << 20


class TestViolations:
    """It finds what must not be."""

    @staticmethod
    def run() -> CaseResult:
        return simulate_valid("seed=1 steps=2")

    def test_different_state_is_a_violation(self) -> None:
        result = self.run()
        result.outcomes["gpu/0"].state = np.zeros(cases.WIDTH, np.uint32)
        assert "something else" in find_violations(result)[0]

    def test_leftover_tensor_is_a_violation(self) -> None:
        result = self.run()
        result.outcomes["gpu/0"].leftover_tensors = 1
        assert "1 tensors are left" in find_violations(result)[0]

    def test_stop_without_a_fault_or_a_name_is_a_violation(self) -> None:
        result = self.run()
        result.outcomes["gpu/0"].state, result.outcomes["gpu/0"].error = None, OptionError("it broke")
        assert any("without a name" in text for text in find_violations(result))
        assert any("it stopped" in text for text in find_violations(result))

    def test_worker_that_completes_alone_is_a_violation(self) -> None:
        result = simulate(Case.parse("seed=1 faults=npu/0:forward.before=raise@3"))
        result.outcomes["npu/0"].state = cases.run_undisturbed(2, 3)[1]
        assert any("ended well" in text for text in find_violations(result))

    def test_changed_tensor_is_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compute_forward = cases.compute_forward
        monkeypatch.setattr(
            cases,
            "compute_backward",
            lambda outputs, received: compute_forward(outputs[: cases.NARROW], received, 0, 0),
        )
        simulate_valid("seed=1")  # all do the same: the oracle, too
        monkeypatch.setattr("tests.simulation.case.run_undisturbed", lambda *case: [cases.make_initial_state(0)] * 2)
        assert len(simulate(Case.parse("seed=1")).wrong) == 2


def test_failure_prints_the_command_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "seed=1 faults=npu/0:update.begun=kill@2"]) == 0
    output = capsys.readouterr().out
    assert "npu/0: 1 steps, killed at" in output and "worker 'npu/0' is gone" in output
    result = simulate(Case.parse("seed=1"))
    assert describe_failure(result).splitlines()[1].strip() == f"python -m tests.soak.simulated --case '{result.case}'"
