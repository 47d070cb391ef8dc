"""Reports add up over a run, and read well."""

from __future__ import annotations

import pytest

from whale_nebula.errors import StateError
from whale_nebula.report import LinkReport, Report, StageReport, last_report, publish
from whale_nebula.report.published import forget


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def report(step: int, sent: int) -> Report:
    links = {"gpu->npu": LinkReport(payload_bytes=sent, bytes=sent + 10, raw_bytes=2 * sent, frames=1)}
    return Report("fit", step, 0.5, 2, {"gpu": StageReport(0.2, 0.3), "npu": StageReport()}, links)


def test_without_a_step_there_is_none() -> None:
    with pytest.raises(StateError, match="no step has run yet"):
        last_report()


def test_totals_are_of_the_whole_run() -> None:
    publish(report(1, 100))
    publish(report(2, 50))
    totals = last_report().run
    assert (totals.steps, totals.seconds) == (2, 1.0)
    assert totals.links["gpu->npu"] == LinkReport(150, 170, 300, 2)


def test_a_link_that_was_silent_keeps_its_total() -> None:
    publish(report(1, 100))
    publish(Report("eval", 1, 0.1, 1, {}, {}))
    assert last_report().run.links["gpu->npu"].bytes == 110
    assert last_report().links == {}


def test_the_ratio_of_an_empty_link_is_nought() -> None:
    assert LinkReport().ratio == 0.0


def test_the_text_names_stages_and_links() -> None:
    text = str(publish(report(3, 1024)))
    assert text.splitlines()[0] == "step 3 of fit: 0.500 s, 2 micro-batches"
    assert "stage gpu: computes 0.200 s, waits 0.300 s" in text
    assert "stage npu: part of one local function, not timed apart" in text
    assert "link gpu->npu: 1.0 KiB (50 % of the tensors)" in text
