"""Simulated runs: a sample of the cases of `python -m tests.soak.simulated`, and tests of the judge itself."""

import random
from collections import Counter

import numpy as np
import pytest

from tests.simulation import case as lesson
from tests.simulation.case import PATIENCE, REACHED, Case, Found, grid, judge, random_case
from tests.simulation.simulator import NOTICED, simulate
from tests.soak.simulated import main, repro
from whale_nebula.errors import OptionError
from whale_nebula.faults import POINTS, Action
from whale_nebula.transport import peer
from whale_nebula.wire import frame

SAMPLE, SEED = 100, 20_260_101
HEALS = ["cut:5", "reset", "duplicate", "reorder", "corrupt", "truncate", "replay", "silence:5"]


def good(text: str) -> Found:
    found = simulate(Case.parse(text))
    assert found.wrong == [], repro(found)
    return found


def errors(found: Found) -> dict[str, str]:
    return {worker: str(each.error) for worker, each in found.outcomes.items() if each.error is not None}


def test_a_sample_of_the_grid_is_as_it_must_be() -> None:
    """`python -m tests.soak.simulated` runs all of it."""
    bad = [found for case in random.Random(SEED).sample(list(grid()), SAMPLE) if (found := simulate(case)).wrong]
    assert not bad, "\n".join(map(repro, bad))


def test_a_sample_of_random_cases_is_as_it_must_be() -> None:
    bad = [found for seed in range(SAMPLE // 2) if (found := simulate(random_case(SEED + seed))).wrong]
    assert not bad, "\n".join(map(repro, bad))


@pytest.mark.parametrize("workers", [2, 3])
def test_an_undisturbed_run_reaches_every_failpoint_and_takes_no_time(workers: int) -> None:
    found = good(f"seed=3 workers={workers} steps=3")
    assert found.went_on and found.seconds < 1.0
    disturbed = good("seed=3 lines=gpu/0>npu/0=cut:1@9").reached
    assert {*found.reached, *disturbed} == set(REACHED)
    others = {name for name in set(POINTS) - set(REACHED) if not name.startswith("checkpoint.")}
    assert others == {"certificate.changed", "certificate.renewed", "failure.telling"}


def test_the_same_case_is_the_same_run() -> None:
    text = "seed=11 workers=3 steps=3 lines=gpu/0>npu/0=corrupt@9,npu/0>tpu/0=cut:2@14"
    runs = [good(text) for _ in range(2)]
    assert runs[0].reached == runs[1].reached and runs[0].seconds == runs[1].seconds


@pytest.mark.parametrize("ill", HEALS)
def test_what_heals_changes_nothing(ill: str) -> None:
    kind, _, seconds = ill.partition(":")
    for number in (8, 13):
        found = good(f"seed={number} steps=4 lines=gpu/0>npu/0={kind}{':' * bool(seconds)}{seconds}@{number}")
        assert found.went_on and len(found.struck) == 1


def test_a_killed_worker_ends_the_others_within_two_seconds_by_its_name() -> None:
    found = good("seed=2 workers=3 faults=npu/0:update.begun=kill@2")
    assert set(errors(found)) == {"gpu/0", "tpu/0"}
    assert all("worker 'npu/0' is gone" in text for text in errors(found).values())
    assert found.outcomes["gpu/0"].at <= NOTICED + 1.0


def test_a_worker_that_fails_tells_the_others() -> None:
    found = good("seed=2 faults=npu/0:update.before=raise@2")
    assert "worker 'npu/0' failed" in errors(found)["gpu/0"] and "update.before=raise@2" in errors(found)["gpu/0"]
    assert found.seconds < PATIENCE


def test_a_worker_that_comes_again_is_not_taken_for_the_old_one() -> None:
    found = good("seed=2 faults=npu/0:update.begun=kill@2 restart=0.5")
    assert "NB-414" in errors(found)["gpu/0"]


def test_a_silence_beyond_patience_ends_all_with_a_name() -> None:
    found = good(f"seed=2 lines=gpu/0>npu/0=silence:{3 * PATIENCE:g}@9")
    assert len(errors(found)) == 2 and "'gpu/0'" in errors(found)["npu/0"]


def test_a_frozen_worker_that_wakes_in_time_changes_nothing() -> None:
    assert good("seed=2 faults=npu/0:update.begun=freeze:6@2").went_on


def test_the_grid_has_every_failpoint_worker_and_action() -> None:
    seen = Counter((f.point, f.worker, f.action) for case in grid() for f in case.faults)
    kills = {(point, worker, Action.KILL) for point in REACHED for worker in ("gpu/0", "npu/0")}
    assert kills <= seen.keys() and sum(seen.values()) > 600


def test_afterwards_everything_is_as_it_was() -> None:
    import threading
    import time

    good("seed=1 faults=npu/0:step.announced=kill@2")
    assert peer.threading is threading and peer.time is time and frame.CHUNK_BYTES == 1 << 20


class TestTheJudge:
    """It finds what must not be."""

    @staticmethod
    def run() -> Found:
        return good("seed=1 steps=2")

    def test_another_model(self) -> None:
        found = self.run()
        found.outcomes["gpu/0"].held = np.zeros(lesson.WIDTH, np.uint32)
        assert "something else" in judge(found)[0]

    def test_a_tensor_too_many(self) -> None:
        found = self.run()
        found.outcomes["gpu/0"].leftover = 1
        assert "1 tensors are left" in judge(found)[0]

    def test_a_stop_for_no_reason_and_one_without_a_name(self) -> None:
        found = self.run()
        found.outcomes["gpu/0"].held, found.outcomes["gpu/0"].error = None, OptionError("it broke")
        assert any("without a name" in text for text in judge(found))
        assert any("it stopped" in text for text in judge(found))

    def test_one_that_ends_well_alone(self) -> None:
        found = simulate(Case.parse("seed=1 faults=npu/0:forward.before=raise@3"))
        found.outcomes["npu/0"].held = lesson.run_undisturbed(2, 3)[1]
        assert any("ended well" in text for text in judge(found))

    def test_a_tensor_that_is_changed_on_its_way_would_be_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = lesson.ahead
        monkeypatch.setattr(lesson, "back", lambda kept, came: plain(kept[: lesson.NARROW], came, 0, 0))
        good("seed=1")  # all do the same: the oracle, too
        monkeypatch.setattr("tests.simulation.case.run_undisturbed", lambda *case: [lesson.fresh(0)] * 2)
        assert len(simulate(Case.parse("seed=1")).wrong) == 2


def test_a_failure_prints_the_line_that_runs_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "seed=1 faults=npu/0:update.begun=kill@2"]) == 0
    said = capsys.readouterr().out
    assert "npu/0: 1 steps, killed at" in said and "worker 'npu/0' is gone" in said
    found = simulate(Case.parse("seed=1"))
    assert repro(found).splitlines()[1].strip() == f"python -m tests.soak.simulated --case '{found.case}'"
