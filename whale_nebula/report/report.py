"""The report of a step: seconds by stage, bytes by link, the totals of the run, and the cost of the step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from whale_nebula.errors.text import Named
from whale_nebula.hardware import Clusters
from whale_nebula.plain import write_json
from whale_nebula.report import saved
from whale_nebula.report.bottleneck import describe_bottleneck, describe_straggler
from whale_nebula.report.prediction import Basis, PlannedReport, Prediction, predict
from whale_nebula.report.records import (
    ALONE,
    ONCE,
    BoundaryReport,
    Goodput,
    LinkReport,
    MeetingsReport,
    RemoteMeasurements,
    RunTotals,
    Scalars,
    Span,
    StageReport,
    WorkerReport,
    duration,
)
from whale_nebula.report.text import report_text

_WIDTH = 72
_SPARE_LETTERS = "0123456789"


class Timeline(tuple["Span", ...]):
    """The spans of a step, a tuple; its text is a line for each lane, with a letter for each span.

    >>> from whale_nebula.report.records import Span
    >>> timeline = Timeline([Span("gpu", "forward 0", 0.0, 0.25, 0), Span("gpu", "backward 0", 0.75, 1.0, 0)])
    >>> print(str(timeline).replace("F" * 18, "FF").replace("B" * 18, "BB").replace("." * 36, "...."))
    1.000 s from left to right; F forward, B backward
      gpu |FF....BB|  0.500 s in 2 pieces
    >>> timeline[0].what
    'forward 0'
    """

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "nothing was timed: with free links a step runs as one function"
        whole = max(span.end for span in self) or 1.0
        lanes = list(dict.fromkeys(span.lane for span in self))
        letters = _assign_letters(dict.fromkeys(_first_word(span) for span in self))
        named = ", ".join(f"{letter} {word}" for word, letter in letters.items())
        wide = max(map(len, lanes))
        lines = [
            f"  {lane:{wide}} |{self._draw_lane(lane, whole, letters)}|  {self._lane_text(lane)}" for lane in lanes
        ]
        return "\n".join([f"{duration(whole)} from left to right; {named}", *lines])

    __repr__ = __str__

    def _draw_lane(self, lane: str, whole: float, letters: Mapping[str, str]) -> str:
        columns = ["."] * _WIDTH
        for span in sorted(
            self._select_lane(lane), key=lambda each: each.start - each.end
        ):  # inner spans are drawn over outer ones
            first = min(int(span.start / whole * _WIDTH), _WIDTH - 1)
            last = max(first + 1, round(span.end / whole * _WIDTH))
            columns[first:last] = letters[_first_word(span)] * (min(last, _WIDTH) - first)
        return "".join(columns)

    def _lane_text(self, lane: str) -> str:
        own = self._select_lane(lane)
        busy, seen = 0.0, 0.0
        for span in sorted(own, key=lambda each: each.start):  # nested spans are counted once
            busy += max(0.0, span.end - max(seen, span.start))
            seen = max(seen, span.end)
        return f"{duration(busy)} in {len(own)} piece{'s' * (len(own) != 1)}"

    def _select_lane(self, lane: str) -> list[Span]:
        return [span for span in self if span.lane == lane]


def _first_word(span: Span) -> str:
    return span.what.split()[0]


def _assign_letters(words: Iterable[str]) -> dict[str, str]:
    """A letter for each word, from the word itself unless another word has it.

    >>> _assign_letters(["forward", "encode", "evaluate", "fee"])
    {'forward': 'F', 'encode': 'E', 'evaluate': 'V', 'fee': 'f'}
    """
    found: dict[str, str] = {}
    for word in words:
        free = (each for each in [*word.upper(), *word, *_SPARE_LETTERS] if each not in found.values())
        found[word] = next(free, "*")
    return found


_STEP = "step"


def chrome_trace(report: Report) -> dict[str, Any]:
    """The spans of a report as trace events of Chrome; the step itself is one, so the trace is never empty."""
    lanes = _name_lanes(report)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in lanes.values()), 1)}
    threads = {lane: (numbers[name], number) for number, (lane, (name, _)) in enumerate(lanes.items(), 1)}
    events = [
        _name_event("process_name", number, 0, name if name == _STEP else f"cluster {name}")
        for name, number in numbers.items()
    ]
    events += [_name_event("thread_name", *threads[lane], name) for lane, (_, name) in lanes.items()]
    whole = Span(ONCE, f"step {report.step} of {report.program}", 0.0, report.step_seconds)
    ordered = sorted([whole, *report.spans], key=lambda span: (span.start, -span.end))
    events += [_make_event(span, *threads[span.lane]) for span in ordered]
    about = {"program": report.program, "step": report.step, "worker": report.worker, "time": report.time}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _name_lanes(report: Report) -> dict[str, tuple[str, str]]:
    """Lane to (process, thread): the step first, then each cluster's stages and outgoing links."""
    lanes = {ONCE: (_STEP, ONCE)}
    lanes |= {name: (stage.cluster or name, f"stage {name}") for name, stage in report.stages.items()}
    links = dict.fromkeys([*report.links, *(span.lane for span in report.spans if span.lane not in lanes)])
    clusters = {process for process, _ in lanes.values()}
    for name in links:
        source = name.split("->")[0]
        lanes[name] = (source if source in clusters else name, f"link {name}")
    return lanes


def _name_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _make_event(span: Span, process: int, thread: int) -> dict[str, Any]:
    about = {"micro_batch": span.micro_batch, "phase": span.phase, "bytes": span.bytes}
    return {
        "ph": "X",
        "name": span.what,
        "cat": span.what.split()[0],
        "pid": process,
        "tid": thread,
        "ts": round(1e6 * span.start, 3),
        "dur": round(1e6 * max(span.end - span.start, 0.0), 3),
        "args": {name: value for name, value in about.items() if value is not None},
    }


@dataclass(frozen=True)
class Report:
    """The last step: stages in order, links as "a->b", predictions, and the run's totals.

    `scalars` are the single numbers that the step returned, its loss and metrics; `worker` is the process that
    reports, and `time` when the step ended, in seconds since 1970. In a run of several processes `stages` and `links`
    are this process's own; reports of the others are in `elsewhere`. `meetings` is set under local SGD. `workers` has
    the memory of each process, for the others as of the previous step. `planned` is set for plans by
    `nb.auto_parallel`, once steps were measured, `goodput` if checkpoints are written, and `cost` if the config has
    prices.
    """

    program: str
    step: int
    step_seconds: float
    micro_batches: int
    stages: Mapping[str, StageReport]
    links: Mapping[str, LinkReport]
    spans: tuple[Span, ...] = ()
    basis: Basis | None = None
    notes: tuple[str, ...] = ()
    run: RunTotals = field(default_factory=RunTotals)
    scalars: Mapping[str, float] = field(default_factory=Scalars)
    worker: str = ALONE
    time: float = 0.0
    elsewhere: RemoteMeasurements = field(default_factory=RemoteMeasurements)
    boundaries: Mapping[str, BoundaryReport] = field(default_factory=dict)
    meetings: MeetingsReport | None = None
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)
    planned: PlannedReport | None = None
    goodput: Goodput | None = None
    cost: StepCost | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "links", "boundaries", "workers"):
            object.__setattr__(self, name, Named(getattr(self, name)))

    @property
    def all_stages(self) -> dict[str, StageReport]:
        """The reports of all stages: those of this process first, then those of others."""
        return {**self.stages, **self.elsewhere.stages, **self.stages}

    @property
    def all_links(self) -> dict[str, LinkReport]:
        """The reports of all links: those of this process first, then those of others."""
        return {**self.links, **self.elsewhere.links, **self.links}

    @cached_property
    def prediction(self) -> Prediction | None:
        """The simulator's prediction of this step, from the pace of earlier ones; None before two have run, and if
        stages are not timed separately.
        """
        return None if self.basis is None else predict(self.basis)

    @property
    def predicted_seconds(self) -> float | None:
        """The seconds of `prediction`, to compare with `step_seconds`."""
        return None if self.prediction is None else self.prediction.seconds

    @cached_property
    def bottleneck(self) -> str:
        """A sentence on the bottleneck of the step, and how to relieve it, from measurements and simulations only.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).bottleneck
        'there is only one stage, so no data crosses a link'
        """
        sentence = describe_bottleneck(self)
        return sentence if self.worker == ALONE else f"measured by {self.worker}: {sentence}"

    @cached_property
    def straggler(self) -> str:
        """A sentence on the replica of a stage for which the others wait, how long, and what would help; empty if none
        is much slower than the others.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).straggler
        ''
        """
        return describe_straggler(self)

    def timeline(self) -> tuple[Span, ...]:
        """The timeline in seconds from the start of the step: a tuple of spans, which prints as a drawing."""
        return Timeline(self.spans)

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline as trace events, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        >>> Report("fit", 1, 0.5, 1, {"gpu": StageReport()}, {}).to_chrome_trace()["displayTimeUnit"]
        'ms'
        """
        return chrome_trace(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_chrome_trace()` to a file that Perfetto opens."""
        write_json(path, self.to_chrome_trace(), indent=None)

    def to_json(self) -> str:
        """The report on one line of JSON, as in the metrics file, with the spans.

        >>> Report("fit", 1, 0.5, 1, {}, {}).to_json()[:30]
        '{"format":"whale_nebula report'
        """
        return saved.json_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON: `whale-nebula show --report FILE` prints it, and `Report.load` reads it."""
        saved.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a report written by `save`, or the last step of a metrics file."""
        return read(path)[0][-1]

    def __str__(self) -> str:
        return report_text(self)


def read(path: str | os.PathLike[str]) -> tuple[list[Report], int]:
    """The reports in a file, one or many, and the number of invalid lines, such as an incomplete line of a process that
    died.
    """
    return saved.read(Report, path)


_HOUR = 3600.0
_GB = 1e9


@dataclass(frozen=True)
class StepCost:
    """The cost of a step with this number of rows, in the currency of the config's prices: of all workers of the run
    for its seconds, and of the bytes on all links.

    >>> cost = StepCost(workers=0.003, links=0.001, rows=32)
    >>> cost.total, cost.per_sample
    (0.004, 0.000125)
    """

    workers: float
    links: float
    rows: int

    @property
    def total(self) -> float:
        """The cost of the step."""
        return self.workers + self.links

    @property
    def per_sample(self) -> float:
        """The cost of a row."""
        return self.total / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        share = f" ({100 * self.links / self.total:.0f} % of it for transfers)" if self.links else ""
        return f"{self.total:.3g} per step{share}, {1e6 * self.per_sample:.3g} per million samples"


@dataclass(frozen=True)
class Prices:
    """The prices of a run: of all its workers for a second, and of a byte on each link, "gpu->npu"."""

    second: float
    byte: Mapping[str, float]

    @classmethod
    def from_clusters(cls, clusters: Clusters) -> Self | None:
        """The prices in a cluster object; None where it has none. A worker without a price costs nothing."""
        hours = [worker.device.price_per_hour for worker in clusters.workers]
        byte = {f"{a}->{b}": link.cost_per_gb / _GB for (a, b), link in clusters.links.items() if link.cost_per_gb}
        if not byte and all(price is None for price in hours):
            return None
        return cls(sum(price or 0.0 for price in hours) / _HOUR, byte)

    def price_step(self, seconds: float, links: Mapping[str, LinkReport], rows: int) -> StepCost:
        """The cost of a step.

        >>> Prices(0.001, {"gpu->npu": 1e-9}).price_step(2.0, {"gpu->npu": LinkReport(bytes=10**6)}, 32)
        StepCost(workers=0.002, links=0.001, rows=32)
        """
        crossed = sum(self.byte.get(name, 0.0) * link.bytes for name, link in links.items())
        return StepCost(self.second * seconds, crossed, rows)
