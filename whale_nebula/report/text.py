"""The text form of a report: measurements, with predictions; and the log lines of steps, one every ten seconds."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whale_nebula.errors.text import align_columns
from whale_nebula.report.prediction import LinkPrediction, StagePrediction, planned_lines
from whale_nebula.report.records import (
    ALONE,
    EXCHANGE,
    ONCE,
    BoundaryReport,
    LinkReport,
    StageReport,
    duration,
    goodput_text,
    size,
)

if TYPE_CHECKING:
    from whale_nebula.report.report import Report

_HEADS = ("boundary", "codec", "raw -> payload", "on the wire", "error", "encode", "decode")
_NOTHING = "-"


def boundary_lines(boundaries: Mapping[str, BoundaryReport]) -> list[str]:
    r"""A line for each direction that is encoded, under a header line; empty if none is encoded.

    Values measured in another process (the error and the encoding of what is only received here) are a dash.

    >>> shown = {"b0 gpu->npu": BoundaryReport("int8", 4096, 1088, 1216, 1, 0.002, 0.001, 0.0093)}
    >>> print("\n".join(boundary_lines(shown)))
    boundary     codec  raw -> payload      on the wire  error   encode  decode
    b0 gpu->npu  int8   4.0 KiB -> 1.1 KiB  29.7 %       0.0093  2.0 ms  1.0 ms
    """
    rows = [_boundary_row(name, each) for name, each in coded_boundaries(boundaries).items()]
    return align_columns([_HEADS, *rows]) if rows else []


def coded_boundaries(boundaries: Mapping[str, BoundaryReport]) -> dict[str, BoundaryReport]:
    """The directions whose tensors a codec compressed."""
    return {n: b for n, b in boundaries.items() if b.codec not in ("", "none") or b.payload_bytes != b.raw_bytes}


def describe_direction(name: str, crossing: BoundaryReport) -> str:
    """A short text on a direction.

    >>> describe_direction("b0 gpu->npu", BoundaryReport("int8", 4096, 1088, 1216, 1, error=0.0093))
    'b0 gpu->npu as int8 1.2 KiB (29.7 %, error 0.0093)'
    """
    off = "" if crossing.error is None else f", error {crossing.error:.2g}"
    return f"{name} as {crossing.codec or _NOTHING} {size(crossing.wire_bytes)} ({100 * crossing.ratio:.3g} %{off})"


def _boundary_row(name: str, boundary: BoundaryReport) -> tuple[str, ...]:
    return (
        name,
        boundary.codec or _NOTHING,
        f"{size(boundary.raw_bytes)} -> {size(boundary.payload_bytes)}",
        f"{100 * boundary.ratio:.3g} %",
        _NOTHING if boundary.error is None else f"{boundary.error:.2g}",
        duration(boundary.encode_seconds) if boundary.encode_seconds else _NOTHING,
        duration(boundary.decode_seconds) if boundary.decode_seconds else _NOTHING,
    )


def name_predicted_replica(report: Report, stage: str) -> str:
    """The replica that a stage's predictions are for, as their suffix: " for the busiest replica" if this process
    measures only one of several, else "".
    """
    return " for the busiest replica" if report.worker != ALONE and _count_copies(report, stage) > 1 else ""


def name_predicted_workers(report: Report, link: str) -> str:
    """The workers that a link's predicted bytes are for, as their suffix: " for all workers of gpu" if this process
    measures only its own share of them, else "".
    """
    cluster = link.partition("->")[0]
    stages = report.all_stages
    shared = any(each.cluster == cluster and _count_copies(report, name) > 1 for name, each in stages.items())
    return f" for all workers of {cluster}" if report.worker != ALONE and shared else ""


def _count_copies(report: Report, stage: str) -> int:
    basis = report.basis
    if basis is None or stage not in basis.stages:
        return 1
    return max((phase.works[basis.stages.index(stage)].replicas for phase in basis.phases), default=1)


_LARGE_OVERHEAD = 1.1
_UPDATES = "updates, metrics, results"


def report_text(report: Report, *, bottleneck: bool = True) -> str:
    """The report, a line for each stage and link, and the bottleneck in a sentence.

    >>> from whale_nebula.report.report import Report
    >>> links = {"gpu->npu": LinkReport(payload_bytes=2048, bytes=2150, raw_bytes=4096, frames=1)}
    >>> print(report_text(Report("fit", 2, 0.5, 2, {"gpu": StageReport(0.2, 0.3)}, links)))
    step 2 of fit: 0.500 s, 2 micro-batches
      stage gpu: computes 0.200 s, waits 0.300 s
      link gpu->npu: 2.1 KiB (52 % of the tensors)
      bottleneck: stage gpu waits 60 % of the step; the cause is simulated after two measured steps
    """
    whose = report.program if report.worker == ALONE else f"{report.program} in {report.worker}"
    many = f"{report.micro_batches} micro-batch{'es' * (report.micro_batches != 1)}"
    lines = [f"step {report.step} of {whose}: {duration(report.step_seconds)}, {many}"]
    if report.scalars:
        lines.append(f"  returned: {scalars_text(report)}")
    prediction = report.prediction
    if prediction is not None:
        lines.append(f"  predicted: {duration(prediction.seconds)} (simulated from earlier steps)")
    stages = prediction.stages if prediction is not None else {}
    links = prediction.links if prediction is not None else {}
    lines += [
        f"  stage {name}: {_stage_text(stage, stages.get(name), name_predicted_replica(report, name))}"
        for name, stage in report.stages.items()
    ]
    lines += [
        f"  link {name}: {_link_text(link, links.get(name), name_predicted_workers(report, name))}"
        for name, link in report.links.items()
    ]
    lines += [f"  {line}" for line in boundary_lines(report.boundaries)]
    if report.meetings is not None:
        lines.append(f"  meetings {report.meetings}")
        lines += [f"  {report.meetings.chosen}"] * bool(report.meetings.chosen)
    if report.cost is not None:
        lines.append(f"  cost: {report.cost}")
    if report.goodput is not None:
        lines.append(f"  {goodput_text(report.goodput)}")
    lines += [f"  {line}" for line in (planned_lines(report.planned) if report.planned is not None else ())]
    if (once := _describe_once(report)) is not None:
        lines.append(f"  once per step ({_UPDATES}): {once}")
    if bottleneck:
        lines.append(f"  bottleneck: {report.bottleneck}")
    if report.straggler:
        lines.append(f"  straggler: {report.straggler}")
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def scalars_text(report: Report) -> str:
    """The scalars of the step: "loss 0.3124, accuracy 0.91"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in report.scalars.items())


def _stage_text(stage: StageReport, predicted: StagePrediction | None, qualifier: str) -> str:
    if stage.compute_seconds is None or stage.wait_seconds is None:
        return f"part of one function, not timed separately{_replicas_text(stage)}"
    computes = _predicted_text(None if predicted is None else predicted.compute_seconds, qualifier)
    waits = _predicted_text(None if predicted is None else predicted.wait_seconds, qualifier)
    text = f"computes {duration(stage.compute_seconds)}{computes}, waits {duration(stage.wait_seconds)}{waits}"
    codecs = _predicted_text(None if predicted is None else predicted.codec_seconds, qualifier)
    text += f", encodes and decodes {duration(stage.codec_seconds)}{codecs}" if stage.codec_seconds else ""
    return text + _replicas_text(stage)


def _replicas_text(stage: StageReport) -> str:
    """The number of a stage's replicas, and their idle time, if known.

    >>> from whale_nebula.report.records import busiest
    >>> _replicas_text(busiest([StageReport(3.0), StageReport(1.0)]))
    '; 2 replicas, idle 2.000 s in total while waiting for the slowest'
    >>> _replicas_text(StageReport(replicas=None, copies=2))
    '; 2 replicas'
    """
    if stage.copies < 2:
        return ""
    idle = stage.idle_seconds
    idle_text = "" if idle is None else f", idle {duration(idle)} in total while waiting for the slowest"
    return f"; {stage.copies} replicas{idle_text}"


def _link_text(link: LinkReport, predicted: LinkPrediction | None, qualifier: str) -> str:
    parts = [f"{size(link.bytes)} ({100 * link.ratio:.0f} % of the tensors{_explain_overhead(link)})"]
    if link.seconds:
        parts.append(f"link busy {duration(link.seconds)}")
    if predicted is not None:
        most = "at most " if predicted.at_most else ""
        parts.append(f"predicted {most}{size(predicted.bytes)}, {duration(predicted.seconds)}{qualifier}")
    return ", ".join(parts)


def _explain_overhead(link: LinkReport) -> str:
    """A note if clearly more bytes were sent than those of the tensors: frames have headers, and control messages
    count.

    >>> _explain_overhead(LinkReport(payload_bytes=8, bytes=144, raw_bytes=8, frames=1))
    '; the header of 1 frame, 136 B with control messages, is larger than the tensors'
    >>> _explain_overhead(LinkReport(payload_bytes=1024, bytes=1160, raw_bytes=1024, frames=1))
    '; the header of 1 frame adds 136 B, including control messages'
    """
    extra = link.bytes - link.payload_bytes
    if link.ratio < _LARGE_OVERHEAD or not link.frames:
        return ""
    one = link.frames == 1
    headers = "the header of 1 frame" if one else f"the headers of {link.frames} frames"
    if extra > link.payload_bytes:
        return f"; {headers}, {size(extra)} with control messages, {'is' if one else 'are'} larger than the tensors"
    return f"; {headers} add{'s' * one} {size(extra)}, including control messages"


def _describe_once(report: Report) -> str | None:
    """The time of what ran once per step; None if it was not timed. Waits are spans within those of updates."""
    spans = [span for span in report.spans if span.lane == ONCE]
    took = sum(span.end - span.start for span in spans if span.what != EXCHANGE)
    waited = sum(span.end - span.start for span in spans if span.what == EXCHANGE)
    if not spans:
        return None
    basis = report.basis
    computes = f"computes {duration(took - waited)}{_predicted_text(None if basis is None else basis.once)}"
    return f"{computes}, waits {duration(waited)}{_predicted_text(None if basis is None else basis.exchange_seconds)}"


def _predicted_text(seconds: float | None, qualifier: str = "") -> str:
    return "" if seconds is None else f" (predicted {duration(seconds)}{qualifier})"


# ---------------------------------------------------------------------- log lines of steps
_RECENT = 32


@dataclass
class Rate:
    """Steps per second of each program, over its last 32 intervals between steps.

    A program's first step, which is traced, does not count, nor does the time between two steps in which another
    program ran: a validation is not part of training.
    """

    _step_seconds: dict[str, deque[float]] = field(default_factory=dict)
    _last_report: Report | None = None

    def add(self, report: Report) -> float | None:
        """Add a step; returns the rate, or None before two consecutive steps of its program.

        >>> from whale_nebula.report.report import Report
        >>> rate, steps = Rate(), [("fit", 5.0), ("fit", 5.5), ("test", 9.0), ("fit", 20.0), ("fit", 20.5)]
        >>> [rate.add(Report(name, 1, 0.1, 1, {}, {}, time=time)) for name, time in steps]
        [None, 2.0, None, 2.0, 2.0]
        """
        taken = self._step_seconds.setdefault(report.program, deque(maxlen=_RECENT))
        passed, self._last_report = measure_interval(self._last_report, report), report
        if passed is not None:
            taken.append(passed)
        return len(taken) / sum(taken) if taken else None


def measure_interval(before: Report | None, report: Report) -> float | None:
    """Seconds from the end of the previous step to the end of this one, if both are of one program."""
    if before is None or before.program != report.program or report.time <= before.time:
        return None
    return report.time - before.time


def rate_text(rate: float) -> str:
    """Steps per second as text; they include the time between steps.

    >>> rate_text(1.904)
    '1.9 steps/s overall'
    """
    return f"{rate:.3g} steps/s overall"


EVERY_SECONDS = 10.0

log = logging.getLogger("whale_nebula.steps")


class StepLog:
    """Logs each program's first step, then at most one step every `every` seconds, and the last one of each program;
    only while `is_selected()` is true.
    """

    def __init__(
        self,
        is_selected: Callable[[], bool] = lambda: True,
        every: float = EVERY_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_selected, self._every, self._now = is_selected, every, now
        self._rate = Rate()
        self._started_programs: set[str] = set()
        self._last = float("-inf")
        self._unlogged: dict[str, tuple[Report, float | None]] = {}
        self._undo = _enable_info_lines(log)

    def step(self, report: Report) -> None:
        """Log the step if it is a program's first, or if a line is due; otherwise keep it for `close`."""
        rate = self._rate.add(report)
        first = report.program not in self._started_programs
        self._started_programs.add(report.program)
        if first or self._now() - self._last >= self._every:
            self._log_step(report, rate)
        else:
            self._unlogged[report.program] = report, rate

    def _log_step(self, report: Report, rate: float | None) -> None:
        self._last = self._now()
        self._unlogged.pop(report.program, None)
        if self._is_selected():
            log.info("%s", step_line(report, rate))

    def tick(self) -> None:
        """Do nothing: lines are logged after steps."""

    def close(self) -> None:
        """Log the last step of each program, and restore the logger."""
        for report, rate in list(self._unlogged.values()):
            self._log_step(report, rate)
        self._undo()

    def __str__(self) -> str:
        return "the log of steps"


def step_line(report: Report, rate: float | None) -> str:
    """A step on one line, with the reports of other processes; `rate` is None before two consecutive steps of the
    program.

    >>> from whale_nebula.report.report import Report
    >>> from whale_nebula.report.records import LinkReport, StageReport
    >>> links = {"gpu->npu": LinkReport(2048, 2176, 2048, 1)}
    >>> step_line(Report("fit", 9, 0.5, 4, {"a": StageReport(0.2, 0.3, in_flight=3)}, links), 1.9)
    'step 9 of fit: 0.500 s, 1.9 steps/s overall; a computes 0.200 s, waits 0.300 s, 3 in flight; ...'
    """
    head = [f"step {report.step} of {report.program}: {duration(report.step_seconds)}"]
    head += [] if rate is None else [rate_text(rate)]
    parts = [", ".join([*head, *([scalars_text(report)] if report.scalars else [])])]
    for name, stage in report.all_stages.items():
        if stage.compute_seconds is not None and stage.wait_seconds is not None:
            computes, waits = duration(stage.compute_seconds), duration(stage.wait_seconds)
            parts.append(f"{name} computes {computes}, waits {waits}, {stage.in_flight} in flight")
    parts += [f"{name} {size(link.bytes)}" for name, link in report.all_links.items()]
    return "; ".join(
        [*parts, *(describe_direction(name, each) for name, each in coded_boundaries(report.boundaries).items())]
    )


def _enable_info_lines(logger: logging.Logger) -> Callable[[], None]:
    """Let the logger output INFO lines, on standard error if it has no handler. Returns the function that undoes it."""
    level = logger.level
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    handler = None if logger.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        handler.setFormatter(logging.Formatter("whale_nebula: %(message)s"))
        logger.addHandler(handler)

    def undo() -> None:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)

    return undo
