"""`nb.verify` in several processes: each temporarily holds the whole model; the results are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_workers
from tests.processes.workers import train

pytestmark = pytest.mark.grid  # `test_splits` asks `nb.verify` of a model in four processes


@pytest.fixture(scope="module")
def pair() -> FinishedRun:
    ended = run_workers("train", 2, "verify_model")
    ended.result.check()
    return ended


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The reports of the same program in one process."""
    return run_in_this_process(train.verify_model, links="10gbit,0ms")


def test_verification_matches_that_of_one_process(pair: FinishedRun, reference: dict[str, Any]) -> None:
    assert pair.get_common("ok") is reference["ok"] is True
    assert sorted(pair.get_common("names")) == sorted(reference["names"])
    assert any("first" in name for name in reference["names"]) and any("second" in name for name in reference["names"])
    assert pair.get_common("text").splitlines()[0] == reference["text"].splitlines()[0]


def test_verification_fails_for_a_wrong_gradient(pair: FinishedRun, reference: dict[str, Any]) -> None:
    assert pair.get_common("wrong") is reference["wrong"] is False


def test_verification_restores_the_model(pair: FinishedRun, reference: dict[str, Any]) -> None:
    assert pair.get_common("as before") and reference["as before"]
    assert pair.get_all("first is empty") == [False, True]  # in c1, again
    assert pair.get_common("loss") == pytest.approx(reference["loss"], rel=1e-5)
