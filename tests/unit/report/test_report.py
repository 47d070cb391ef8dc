"""Reports: sums over a run, text, and what a step costs by the prices of a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.errors import StateError
from whale_nebula.report.published import last_report, publish
from whale_nebula.report.records import LinkReport, StageReport
from whale_nebula.report.report import RemoteMeasurements, Report


def make_report(step: int, sent: int) -> Report:
    links = {"gpu->npu": LinkReport(payload_bytes=sent, bytes=sent + 10, raw_bytes=2 * sent, frames=1)}
    return Report("fit", step, 0.5, 2, {"gpu": StageReport(0.2, 0.3), "npu": StageReport()}, links)


def test_last_report_before_any_step_is_an_error() -> None:
    with pytest.raises(StateError, match="no step has run yet") as caught:
        last_report()
    assert caught.value.where.startswith(f"{__file__}:")


def test_report_totals_cover_the_whole_run() -> None:
    publish(make_report(1, 100))
    publish(make_report(2, 50))
    totals = last_report().run
    assert (totals.steps, totals.seconds) == (2, 1.0)
    assert totals.links["gpu->npu"] == LinkReport(150, 170, 300, 2)


def test_own_reports_of_what_several_workers_share_precede_those_of_others() -> None:
    own = make_report(2, 100)
    others = RemoteMeasurements(
        {"npu": StageReport(0.9), "xpu": StageReport()}, {"gpu->npu": LinkReport(), "b->a": LinkReport()}
    )
    both = replace(own, elsewhere=others)
    assert both.all_stages == {**own.stages, "xpu": StageReport()}
    assert list(both.all_stages) == ["gpu", "npu", "xpu"]
    assert both.all_links == {**own.links, "b->a": LinkReport()}


def test_idle_link_keeps_its_total() -> None:
    publish(make_report(1, 100))
    publish(Report("eval", 1, 0.1, 1, {}, {}))
    assert last_report().run.links["gpu->npu"].bytes == 110
    assert last_report().links == {}


def test_last_report_finds_a_program_by_name_suffix() -> None:
    names = ["model.train_step", "model.test_step", "other.train_step", "train_step", "model.predict_step"]
    for step, program in enumerate(names):
        publish(Report(program, step, 0.1, 1, {}, {}))
    assert last_report().program == "model.predict_step"
    assert last_report("model.train_step").step == 0
    assert last_report("test_step").step == 1
    assert last_report(program="other.train_step").step == 2
    assert last_report("train_step").program == "train_step", "the whole name wins over the end of another"
    publish(Report("model.test_step", 9, 0.1, 1, {}, {}))
    assert last_report().step == last_report("test_step").step == 9


def test_ambiguous_name_suffix_gives_the_latest_program() -> None:
    for step, program in enumerate(["b.train_step", "a.train_step", "b.train_step", "a.test_step"]):
        publish(Report(program, step, 0.1, 1, {}, {}))
    assert last_report("train_step").step == 2


@pytest.mark.parametrize("wrong", ["trian_step", "", "train", 3])
def test_unknown_program_error_lists_known_programs(wrong: object) -> None:
    publish(Report("model.train_step", 1, 0.1, 1, {}, {}))
    publish(Report("model.test_step", 1, 0.1, 1, {}, {}))
    with pytest.raises(StateError, match=r"'model.train_step', 'model.test_step'"):
        last_report(wrong)


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


def test_step_cost_sums_worker_seconds_and_link_bytes() -> None:
    workers = ["127.0.0.1:7101", {"address": "127.0.0.1:7102", "price": 5.0}]
    report = run_step({"clusters": {"gpu": {"price": 2.0, "workers": workers}, "npu": {}}, "links": LINKS})
    assert report.cost is not None
    assert report.cost.rows == 8
    assert report.cost.workers == pytest.approx(7.0 / 3600 * report.step_seconds)
    assert report.cost.links == pytest.approx(0.08e-9 * sum(link.bytes for link in report.links.values()))
    assert report.cost.links > 0
    assert report.cost.per_sample == (report.cost.workers + report.cost.links) / 8
    assert f"cost: {report.cost}" in str(report)


def test_report_without_prices_has_no_cost() -> None:
    report = run_step({"clusters": {"gpu": {}, "npu": {}}})
    assert report.cost is None
    assert "cost" not in str(report)


def test_saved_report_keeps_its_cost(tmp_path: Any) -> None:
    report = run_step({"clusters": {"gpu": {"price": 2.0}, "npu": {}}}, far="gpu")
    assert report.cost is not None and (report.cost.rows, report.cost.links) == (8, 0.0)
    report.save(tmp_path / "step.json")
    assert Report.load(tmp_path / "step.json").cost == report.cost
