"""Reports as JSON: round trips, and refusal of other files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.sample_reports import make_full_report
from whale_nebula.errors import StateError
from whale_nebula.report.records import RunTotals, Scalars
from whale_nebula.report.report import Report, read
from whale_nebula.report.saved import FORMAT, json_line, json_text


def test_saved_report_round_trips(tmp_path: Path) -> None:
    report = replace(make_full_report(), run=RunTotals(3, 1.5, make_full_report().links))
    report.save(tmp_path / "step.json")
    found = Report.load(tmp_path / "step.json")
    assert found == report
    assert (found.prediction, found.bottleneck, str(found)) == (report.prediction, report.bottleneck, str(report))


def test_report_file_without_boundaries_loads(tmp_path: Path) -> None:
    document = json.loads(json_text(make_full_report()))
    del document["boundaries"]
    (tmp_path / "step.json").write_text(json.dumps(document))
    assert Report.load(tmp_path / "step.json").boundaries == {}


def test_loaded_report_keeps_its_saved_prediction(tmp_path: Path) -> None:
    document = json.loads(json_text(make_full_report()))
    document["predicted"]["seconds"] = 123.0
    (tmp_path / "step.json").write_text(json.dumps(document))
    assert Report.load(tmp_path / "step.json").predicted_seconds == 123.0


def test_report_line_has_all_keys_except_spans() -> None:
    document = json.loads(json_line(make_full_report()))
    assert document["format"] == FORMAT
    assert document.keys() == json.loads(json_text(make_full_report())).keys() - {"spans"}
    assert document["predicted"]["links"].keys() == document["links"].keys()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_is_saved_as_null(value: float, tmp_path: Path) -> None:
    report = replace(make_full_report(), scalars=Scalars(("loss",), (value,)))
    written = json_line(report)
    assert json.loads(written, parse_constant=pytest.fail)["scalars"] == {"loss": None}
    (tmp_path / "run.jsonl").write_text(written)
    assert math.isnan(Report.load(tmp_path / "run.jsonl").scalars["loss"])


def test_load_takes_the_last_line_and_read_counts_broken_lines(tmp_path: Path) -> None:
    lines = [json_line(replace(make_full_report(), step=step)) for step in (1, 2, 3)]
    (tmp_path / "run.jsonl").write_text("\n".join([*lines, lines[0][:100], ""]))
    assert Report.load(tmp_path / "run.jsonl").step == 3
    reports, broken = read(tmp_path / "run.jsonl")
    assert ([report.step for report in reports], broken) == ([1, 2, 3], 1)


@pytest.mark.parametrize(
    "text", ["", "nothing", "{}", "[1, 2]", '{"format": "whale_nebula plan 1"}', '{"format": "whale_nebula report 1"}']
)
def test_invalid_report_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(StateError, match="contains no report") as refused:
        Report.load(tmp_path / "file")
    assert str(tmp_path / "file") in refused.value.where
    assert "save" in refused.value.mend


def test_missing_report_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="FileNotFoundError"):
        Report.load(tmp_path / "none.json")


def test_report_file_is_replaced_atomically(tmp_path: Path) -> None:
    for step in (1, 2):
        replace(make_full_report(), step=step).save(tmp_path / "step.json")
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]
    assert Report.load(tmp_path / "step.json").step == 2


def test_every_report_key_is_documented() -> None:
    explained = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")
    document = json.loads(json_text(make_full_report()))
    parts = [document, document["basis"], document["basis"]["phases"][0], document["run"], document["spans"][1]]
    parts += [next(iter(document[name].values())) for name in ("stages", "links", "boundaries")]
    assert [key for part in parts for key in part if f"`{key}`" not in explained] == []
