"""The report of a step: seconds by stage, bytes by link, and the totals of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from whale_nebula.errors.text import Named
from whale_nebula.report import saved
from whale_nebula.report.bottleneck import describe_bottleneck, describe_straggler
from whale_nebula.report.prediction import Basis, Prediction, predict
from whale_nebula.report.records import (
    ALONE,
    BoundaryReport,
    Elsewhere,
    LinkReport,
    MeetingsReport,
    RunTotals,
    Scalars,
    Span,
    StageReport,
    WorkerReport,
)
from whale_nebula.report.spans import Timeline, chrome_trace
from whale_nebula.report.text import report_text


@dataclass(frozen=True)
class Report:
    """The last step: its stages in order, its links as "a->b", what was predicted, and the run's totals.

    `scalars` are the single numbers that the step returned, its loss and metrics; `worker` is the process that
    reports, and `time` when the step ended, in seconds since 1970. In a run of several processes `stages` and `links`
    are this one's own; what is known of the others is `elsewhere`. `meetings` is there where clusters train apart.
    `workers` says what each process holds, the others as they told it a step before.
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
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    boundaries: Mapping[str, BoundaryReport] = field(default_factory=dict)
    meetings: MeetingsReport | None = None
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("stages", "links", "boundaries", "workers"):
            object.__setattr__(self, name, Named(getattr(self, name)))

    @cached_property
    def prediction(self) -> Prediction | None:
        """What the simulator says of this step, from the pace of those before; None before two have run, and where
        stages are not timed apart.
        """
        return None if self.basis is None else predict(self.basis)

    @property
    def predicted_seconds(self) -> float | None:
        """The seconds of `prediction`: to be held against `step_seconds`."""
        return None if self.prediction is None else self.prediction.seconds

    @cached_property
    def bottleneck(self) -> str:
        """What the step waits for, and what would help, in a sentence. It says nothing that was not computed.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).bottleneck
        'there is one stage, and nothing crosses a link'
        """
        said = describe_bottleneck(self)
        return said if self.worker == ALONE else f"as {self.worker} sees it, {said}"

    @cached_property
    def straggler(self) -> str:
        """Which replica of a stage the others wait for, how long, and what would help, in a sentence; empty where none
        is much slower than the others.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).straggler
        ''
        """
        return describe_straggler(self)

    def timeline(self) -> tuple[Span, ...]:
        """What ran when, in seconds from the start of the step: a tuple of spans, which prints as a drawing."""
        return Timeline(self.spans)

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline as trace events, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        >>> Report("fit", 1, 0.5, 1, {"gpu": StageReport()}, {}).to_chrome_trace()["displayTimeUnit"]
        'ms'
        """
        return chrome_trace(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_chrome_trace()` to a file that Perfetto opens."""
        saved.write(path, self.to_chrome_trace(), indent=None)

    def to_json(self) -> str:
        """The report on one line of JSON, as the metrics file has it, with the spans besides.

        >>> Report("fit", 1, 0.5, 1, {}, {}).to_json()[:30]
        '{"format":"whale_nebula report'
        """
        return saved.text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON: `whale-nebula show --report FILE` prints it, and `Report.load` reads it."""
        saved.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote; of a metrics file, the last step."""
        return read(path)[0][-1]

    def __str__(self) -> str:
        return report_text(self)


def read(path: str | os.PathLike[str]) -> tuple[list[Report], int]:
    """The reports in a file, one or many, and how many of its lines hold none, as where a process died."""
    return saved.read(Report, path)
