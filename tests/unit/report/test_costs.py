"""What a step costs, by the prices of a config."""

from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.report.report import Report

LINKS = [{"between": ["gpu", "npu"], "cost": 0.08}]


def run_step(config: dict[str, Any], far: str = "npu") -> Report:
    """A step of 8 rows in two clusters, or in one, uncut."""
    nb.init(config)
    inputs = keras.Input((4,))
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(4)(inputs)
        with nb.stage(cluster=far):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((8, 4)), np.ones((8, 1)))
    return nb.last_report()


def test_a_step_costs_its_workers_seconds_and_its_links_bytes() -> None:
    workers = ["127.0.0.1:7101", {"address": "127.0.0.1:7102", "price": 5.0}]
    report = run_step({"clusters": {"gpu": {"price": 2.0, "workers": workers}, "npu": {}}, "links": LINKS})
    assert report.cost is not None
    assert report.cost.rows == 8
    assert report.cost.workers == pytest.approx(7.0 / 3600 * report.step_seconds)
    assert report.cost.links == pytest.approx(0.08e-9 * sum(link.bytes for link in report.links.values()))
    assert report.cost.links > 0
    assert report.cost.per_sample == (report.cost.workers + report.cost.links) / 8
    assert f"cost: {report.cost}" in str(report)


def test_without_prices_there_is_no_cost() -> None:
    report = run_step({"clusters": {"gpu": {}, "npu": {}}})
    assert report.cost is None
    assert "cost" not in str(report)


def test_a_saved_report_has_its_cost(tmp_path: Any) -> None:
    report = run_step({"clusters": {"gpu": {"price": 2.0}, "npu": {}}}, far="gpu")
    assert report.cost is not None and (report.cost.rows, report.cost.links) == (8, 0.0)
    report.save(tmp_path / "step.json")
    assert Report.load(tmp_path / "step.json").cost == report.cost
