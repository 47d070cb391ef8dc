"""A timeline as Chrome's trace events, and as a drawing: still a tuple of spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.report.sample_reports import THERE, make_full_report
from whale_nebula.report.records import ONCE, Span, StageReport
from whale_nebula.report.report import Report, Timeline


def read_lanes(trace: dict[str, Any]) -> dict[tuple[int, int], tuple[str, str]]:
    """(process, thread) to their names."""
    named: dict[str, dict[Any, str]] = {"process_name": {}, "thread_name": {}}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            named[event["name"]][key] = event["args"]["name"]
    return {key: (named["process_name"][key[0]], name) for key, name in named["thread_name"].items()}


def list_span_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_trace_events_have_required_fields(tmp_path: Path) -> None:
    make_full_report().save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MX"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    starts = [event["ts"] for event in list_span_events(trace)]
    assert starts == sorted(starts)


def test_trace_maps_clusters_to_processes_and_stages_to_threads() -> None:
    trace = make_full_report().to_chrome_trace()
    assert set(read_lanes(trace).values()) == {
        ("step", ONCE),
        ("cluster gpu", "stage gpu"),
        ("cluster gpu", "link gpu->npu"),
        ("cluster npu", "stage npu"),
        ("cluster npu", "link npu->gpu"),
    }


def test_trace_has_an_event_per_span() -> None:
    report = make_full_report()
    trace = report.to_chrome_trace()
    where = read_lanes(trace)
    found = {(where[event["pid"], event["tid"]][1], event["name"]): event for event in list_span_events(trace)}
    assert found.keys() == {
        (ONCE, "step 3 of fit"),
        ("stage gpu", "forward 0"),
        (f"link {THERE}", "forward 0"),
        (ONCE, "update"),
    }
    message = found[f"link {THERE}", "forward 0"]
    assert (message["ts"], message["dur"]) == (10_000, 10_000)
    assert message["args"] == {"micro_batch": 0, "phase": 0, "bytes": 1000}
    assert found[ONCE, "update"]["args"] == {"phase": 1}
    assert found[ONCE, "step 3 of fit"]["dur"] == round(1e6 * report.step_seconds, 3)


def test_trace_lanes_have_unique_thread_ids() -> None:
    trace = make_full_report().to_chrome_trace()
    assert len({thread for _, thread in read_lanes(trace)}) == len(read_lanes(trace)) == 5


SPANS = (
    Span("gpu", "forward 0", 0.0, 0.5, 0),
    Span("gpu->npu", "forward 0", 0.5, 0.75, 0, 0, 1000),
    Span("gpu", "backward 0", 0.75, 0.999, 0),
    Span(ONCE, "update", 0.9999, 1.0),
)


def test_timeline_draws_a_letter_per_kind_of_work() -> None:
    head, gpu, line, once = str(Timeline(SPANS)).splitlines()
    assert head == "1.000 s from left to right; F forward, B backward, U update"
    assert gpu == f"  gpu         |{'F' * 36}{'.' * 18}{'B' * 18}|  0.749 s in 2 pieces"
    assert line == f"  gpu->npu    |{'.' * 36}{'F' * 18}{'.' * 18}|  0.250 s in 1 piece"
    assert once.startswith(f"  once a step |{'.' * 71}U|")


def test_timeline_is_a_tuple_of_spans() -> None:
    report = Report("fit", 1, 1.0, 1, {"gpu": StageReport()}, {}, spans=SPANS)
    assert report.timeline() == SPANS
    assert isinstance(report.timeline(), tuple)
    assert len(repr(report.timeline()).splitlines()) == 4
