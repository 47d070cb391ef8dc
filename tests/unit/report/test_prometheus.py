"""Prometheus metrics: of one process over HTTP, and of the workers of a launcher."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.sample_reports import make_full_report
from whale_nebula.errors import ConfigError
from whale_nebula.report.prometheus import METRICS, LastReport, Prometheus, read_reports, render_metrics
from whale_nebula.report.records import Goodput, LinkReport, MeetingsReport, RunTotals, WorkerReport

_LINE = re.compile(r'(nebula_\w+)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')


def parse(text: str) -> dict[str, float]:
    """Each sample by its name and labels; every line is one, or says what the metric after it is."""
    found, kind = {}, ""
    for line in text.splitlines():
        if line.startswith("# "):
            kind = line.split()[2]
            continue
        match = _LINE.fullmatch(line)
        assert match and match[1] == kind, line
        assert line.rpartition(" ")[0] not in found
        found[line.rpartition(" ")[0]] = float(match[3])
    return found


def test_prometheus_serves_the_last_report() -> None:
    report = replace(
        make_full_report(),
        goodput=Goodput(100.0, 80.0, 1.0, 4.0, 5.0),
        workers={make_full_report().worker: WorkerReport(5, 7)},
        run=RunTotals(2, 1.0, {"a->b": LinkReport(bytes=9)}),
        meetings=MeetingsReport(("npu",), 9, 2.0, 1.0, 0.0, missed={"npu": 1.5}),
    )
    output = Prometheus("127.0.0.1:0")
    url = f"http://127.0.0.1:{output.port}/metrics"
    try:
        assert urllib.request.urlopen(url, timeout=10).read() == b""
        for step in (1, 2):
            output.step(replace(report, step=step))
        found = parse(urllib.request.urlopen(url, timeout=10).read().decode())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("metrics", "other"), timeout=10)
        with pytest.raises(ConfigError, match="metrics cannot be served"):
            Prometheus(f"127.0.0.1:{output.port}")
    finally:
        output.close()
    worker = f'worker="{report.worker}"'
    assert found[f'nebula_step_number{{{worker},program="fit"}}'] == 2
    assert found[f'nebula_step_seconds{{{worker},program="fit"}}'] == report.step_seconds
    assert found[f'nebula_meetings_missed_total{{{worker},cluster="npu"}}'] == 1.5
    spent = {
        name: found[f'nebula_time_seconds_total{{{worker},spent="{name}"}}'] for name in ("steps", "lost", "other")
    }
    assert spent == {"steps": 80.0, "lost": 4.0, "other": 10.0}
    assert (
        found[f"nebula_peak_bytes{{{worker}}}"] == 7 and found[f'nebula_link_bytes_total{{{worker},link="a->b"}}'] == 9
    )
    assert {name.partition("{")[0] for name in found} == {f"nebula_{metric.name}" for metric in METRICS}


def test_launcher_renders_last_reports_of_workers(tmp_path: Path) -> None:
    for worker in ("c0/0", "c1/0"):
        kept = LastReport(str(tmp_path))
        for step in (1, 2, 3):  # the second and third come within a second of the first
            kept.step(replace(make_full_report(), step=step, worker=worker))
        kept.close()
    (tmp_path / "c2-0.json").write_text('{"cut short')
    found = parse(render_metrics(read_reports(tmp_path)))
    assert [found[f'nebula_step_number{{worker="{each}",program="fit"}}'] for each in ("c0/0", "c1/0")] == [3, 3]


@pytest.mark.parametrize("address", ["9464", "127.0.0.1", "host:port", "host:70000"])
def test_invalid_metrics_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="not a valid address for metrics"):
        Prometheus(address)
