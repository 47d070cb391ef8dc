"""`nb.verify` in several processes: each holds the whole model for a while, with the results of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.worker_runs import Ended, run, told_alone
from tests.processes.workers import train

pytestmark = pytest.mark.grid  # `test_splits` asks `nb.verify` of a model in four processes


@pytest.fixture(scope="module")
def pair() -> Ended:
    ended = run("train", 2, "verifying")
    ended.result.check()
    return ended


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What the same program tells in one process."""
    return told_alone(train.verifying, links="10gbit,0ms")


def test_it_says_what_one_process_says(pair: Ended, alone: dict[str, Any]) -> None:
    assert pair.same("ok") is alone["ok"] is True
    assert sorted(pair.same("names")) == sorted(alone["names"])
    assert any("first" in name for name in alone["names"]) and any("second" in name for name in alone["names"])
    assert pair.same("text").splitlines()[0] == alone["text"].splitlines()[0]


def test_it_finds_what_is_wrong_in_another_cluster(pair: Ended, alone: dict[str, Any]) -> None:
    assert pair.same("wrong") is alone["wrong"] is False


def test_afterwards_all_is_as_before(pair: Ended, alone: dict[str, Any]) -> None:
    assert pair.same("as before") and alone["as before"]
    assert pair.all("first is empty") == [False, True]  # in c1, again
    assert pair.same("loss") == pytest.approx(alone["loss"], rel=1e-5)
