"""Name the slowest replica of a stage, how long the others wait for it, and what would help, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whale_nebula.ir.routing import NEAR, enough, excess, row_name, seconds, shares, take_counts
from whale_nebula.report.records import ALONE, StageReport
from whale_nebula.report.units import duration

if TYPE_CHECKING:
    from whale_nebula.report.report import Report

WORTH = 0.05
"""Who waits for less than this share is not worth a word."""

HELD = 0.1
"""Shares that would be done in so much less time, and are not taken, are held: by the config, or by `nb.shard`."""
_SAID = "the config should say so, workers: [{address: ..., speed: ...}]"


def waits(seconds: Sequence[float]) -> float:
    """How long each replica but the slowest stands idle, on the average.

    >>> waits([3.0, 1.0, 2.0]), waits([1.0])
    (1.5, 0.0)
    """
    return sum(max(seconds) - each for each in seconds) / max(1, len(seconds) - 1) if seconds else 0.0


def straggler_text(stage: str, seconds: Sequence[float], waiting: str, mend: str = "") -> str:
    """Who is slowest, and that the others wait for it.

    >>> straggler_text("npu", [0.08, 0.068], "12 ms of 80 ms", "micro_batch=3 would let shares follow speed")
    'npu.0 is the slowest of npu: npu.1 waits 12 ms of 80 ms; micro_batch=3 would let shares follow speed'
    """
    slowest = max(range(len(seconds)), key=lambda replica: (seconds[replica], -replica))
    others = [row_name(stage, len(seconds), each) for each in range(len(seconds)) if each != slowest]
    who = f"{others[0]} waits" if len(others) == 1 else "the others wait"
    each = " each, on the average" * (len(others) > 1)
    told = f"{row_name(stage, len(seconds), slowest)} is the slowest of {stage}: {who} {waiting}{each}"
    return f"{told}; {mend}" if mend else told


def mend(speeds: Sequence[float], micro_batches: int, rows: int | None = None) -> str:
    """How many micro-batches would let shares follow these speeds; nothing where there are enough, or too few rows.

    >>> mend([1, 2], 2), mend([1, 2], 3), mend([1, 2], 2, rows=2)
    ('micro_batch=3 would let shares follow speed', '', '')
    """
    wanted = enough([speeds], micro_batches)
    helps = excess(speeds, wanted) * NEAR < excess(speeds, micro_batches)
    fits = rows is None or wanted <= rows
    return f"micro_batch={wanted} would let shares follow speed" if helps and fits else ""


def sentence(report: Report) -> str:
    """Of the stage whose replicas wait most: who is slowest, and how long the others wait; empty where that is little.

    >>> from whale_nebula.report.report import Report
    >>> from whale_nebula.report.records import StageReport, busiest
    >>> npu = busiest([StageReport(0.04), StageReport(0.028)])
    >>> sentence(Report("fit", 9, 0.05, 2, {"npu": npu}, {}))
    'npu.0 is the slowest of npu: npu.1 waits 12.0 ms of 50.0 ms'
    """
    told = {name: _seconds(stage) for name, stage in {**report.elsewhere.stages, **report.stages}.items()}
    name = max(told, key=lambda each: waits(told[each]), default="")
    if not name or waits(told[name]) <= WORTH * report.step_seconds:
        return ""
    waiting = f"{duration(waits(told[name]))} of {duration(report.step_seconds)}"
    return straggler_text(name, told[name], waiting, _mend(report, name, told[name]))


def _seconds(stage: StageReport) -> list[float]:
    return [each.compute_seconds or 0.0 for each in stage.replicas or ()]


def _mend(report: Report, stage: str, computed: Sequence[float]) -> str:
    """What would let shares follow speed: a config that says what was seen, or more micro-batches. The replicas of one
    process share its cores: nothing would.
    """
    basis, count = report.basis, report.micro_batches
    if basis is None or stage not in basis.stages or report.worker == ALONE or not all(computed):
        return ""
    work = basis.phases[0].works[basis.stages.index(stage)]
    own = take_counts(work.order, len(computed), count)
    speeds = [share / took for share, took in zip(own, computed, strict=True)]
    if not all(own):
        return ""
    if max(seconds(shares(speeds, count), speeds)) < (1.0 - HELD) * max(computed):
        return f"seen speeds are {_ratio(speeds)}: {_SAID}"
    return mend(speeds, count, basis.rows * count) if basis.divides else ""


def _ratio(speeds: Sequence[float]) -> str:
    return " : ".join(f"{speed / min(speeds):.2g}" for speed in speeds)
