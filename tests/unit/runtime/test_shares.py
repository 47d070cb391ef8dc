"""Replicas with speeds in the config have shares by speed, also in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.runtime.test_replicas import X, Y, close, model, train, train_uncut

LINE = "1gbit,0ms"


def config(*speeds: float) -> dict[str, Any]:
    """A worker in cluster c0, and in c1 those with these speeds."""
    workers = [{"address": f"127.0.0.1:{7100 + number}", "speed": speed} for number, speed in enumerate(speeds)]
    return {"clusters": {"c0": {"workers": ["127.0.0.1:7000"]}, "c1": {"workers": workers}}}


@pytest.mark.parametrize(
    ("speeds", "micro_batch", "micro_batches", "order"),
    [
        ((1, 2), 1, 3, (1, 0, 1)),
        pytest.param((1, 2), 4, 4, (1, 1, 0, 1), marks=pytest.mark.grid),
        ((1, 2), 2, 2, ()),
        pytest.param((1, 3), 1, 4, (1, 1, 0, 1), marks=pytest.mark.grid),
        pytest.param((2, 2), 1, 2, (), marks=pytest.mark.grid),
        pytest.param((1, 1, 2), 1, 4, (2, 0, 1, 2), marks=pytest.mark.grid),
    ],
)
def test_micro_batches_and_order_follow_the_speeds(
    speeds: tuple[float, ...], micro_batch: int, micro_batches: int, order: tuple[int, ...]
) -> None:
    with nb.init(config(*speeds)):
        plan = nb.plan(model((1, len(speeds)), micro_batch), X, Y)
    assert len(plan.rows) == micro_batches
    assert sorted(plan.stages["c1"].order) == sorted(order)


def test_step_with_unequal_shares_equals_the_uncut_step() -> None:
    expected = train_uncut()
    with nb.init(config(1, 2), links=LINE):
        losses, weights = train(model((1, 2), 6))
        report = nb.last_report()
    close(losses, expected[0])
    close(weights, expected[1])
    lanes = [span.lane for span in report.timeline() if span.what.startswith("fused")]
    assert lanes.count("c1.1") > lanes.count("c1.0") > 0


@pytest.mark.grid
def test_random_numbers_do_not_depend_on_the_shares() -> None:
    found = []
    for copies, speeds in (((1, 1), (1,)), ((1, 2), (5, 1))):
        with nb.init(config(*speeds), links=LINE):
            found.append(train(model(copies, 6, dropout=0.4))[0])
    assert all(np.allclose(each, found[0], rtol=1e-6) for each in found)


def test_plan_text_shows_shares_and_waiting_replicas() -> None:
    with nb.init(config(1, 2)):
        three, two = (nb.plan(model((1, 2), count), X, Y) for count in (1, 2))
    assert "c1: replicas take 1 : 2 of 3 micro-batches, in the order 1 0 1 (speeds 1 : 2)" in three.to_text()
    assert "slowest" not in three.to_text()
    assert "replicas take 1 : 2 of 3 micro-batches" in three.to_html()
    warning = "c1.0 is the slowest of c1: c1.1 waits 50 % of that time; with micro_batch=3 shares could match speeds"
    assert warning in " ".join(two.to_text().split())


def test_cluster_speeds_are_in_the_order_of_workers() -> None:
    with nb.init(config(*range(1, 12))) as run:
        assert run.cluster_speeds == {"c1": (1, 2, 11, 3, 4, 5, 6, 7, 8, 9, 10)}  # c1/10 stands before c1/2
    with nb.init(config(2, 2)) as run:
        assert run.cluster_speeds == {"c1": (2, 2)}
    with nb.init({"clusters": {"c1": {"workers": ["127.0.0.1:7100", "127.0.0.1:7101"]}}}) as run:
        assert run.cluster_speeds == {}


def test_order_is_part_of_the_digest_and_the_saved_plan(tmp_path: Path) -> None:
    found = []
    for speeds in ((1, 2), (1, 1), (2, 1)):
        with nb.init(config(*speeds)):
            found.append(nb.plan(model((1, 2), 3), X, Y))
    assert len({plan.digest for plan in found}) == 3
    found[0].save(tmp_path / "plan.json")
    again = nb.Plan.load(tmp_path / "plan.json")
    assert again.stages["c1"].order == (1, 0, 1) and again.difference(found[0]) is None
    assert (found[1].difference(again) or "").endswith("in 2 replicas, in the order 1 0 1 there")
    assert "replicas take 2 : 1 of 3 micro-batches in turn (speeds 1 : 1)" in found[1].to_text()
