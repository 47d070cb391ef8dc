"""The report of a step: seconds by stage, bytes by link, and the totals of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from whale_nebula.errors.suggestions import Named
from whale_nebula.report.basis import Basis
from whale_nebula.report.boundaries import BoundaryReport
from whale_nebula.report.meetings import MeetingsReport
from whale_nebula.report.prediction import Prediction, predict

ALONE = "local/0"
"""The worker of a run in one process: where there are more, what is printed names the one that it is of."""


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds from the start of the step: a stage's forward of a micro-batch, a message
    that held a line, or what runs once a step.

    `lane` is the stage's name, the link's ("gpu->npu") or `ONCE`; `micro_batch` is None for what has none, `bytes` are
    those of a message.
    """

    lane: str
    what: str
    start: float
    end: float
    micro_batch: int | None = None
    phase: int = 0
    bytes: int | None = None


ONCE = "once a step"
"""The lane of what belongs to no stage: no stage can have this name."""

EXCHANGE = "exchange"
"""What an update waits for others, within that lane: scalars, results, gradients of tied variables."""


@dataclass(frozen=True)
class StageReport:
    """A stage in a step. Seconds are None where the step ran as one function and stages were not timed apart.

    `in_flight` is the most micro-batches that were forward but not yet backward, at any time of the step;
    `codec_seconds` is what it took to decode what the stage read and to encode what it sent. Of a stage with several
    replicas these are the numbers of the busiest, and `replicas` are those of all. In a run of several processes they
    are this one's own, and `replicas` what each one computes, as it was last seen. There are `copies` of it; where
    these were not timed apart, `replicas` is None.
    """

    compute_seconds: float | None = None
    wait_seconds: float | None = None
    cluster: str = ""
    in_flight: int | None = None
    codec_seconds: float = 0.0
    replicas: tuple[StageReport, ...] | None = ()
    copies: int = 1

    @property
    def idle_seconds(self) -> float | None:
        """How long the replicas that were done sooner stood idle for the busiest, all together; None where they were
        not timed apart.

        >>> busiest([StageReport(3.0, 0.0), StageReport(1.0, 2.0)]).idle_seconds
        2.0
        """
        if self.replicas is None:
            return None
        found = [each.compute_seconds or 0.0 for each in self.replicas]
        return sum(max(found) - each for each in found)


def busiest(replicas: Sequence[StageReport]) -> StageReport:
    """What the report of a stage says whose replicas were timed apart."""
    first = max(replicas, key=lambda each: each.compute_seconds or 0.0)
    return first if len(replicas) == 1 else replace(first, replicas=tuple(replicas), copies=len(replicas))


@dataclass(frozen=True)
class LinkReport:
    """Everything that workers of one cluster sent to workers of another in a step.

    `seconds` is how long that held the line: of an emulated line by its rate, of a socket while it was written to.

    >>> LinkReport(payload_bytes=50, bytes=60, raw_bytes=120).ratio
    0.5
    """

    payload_bytes: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    frames: int = 0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes on the link for each byte of the tensors as they were."""
        return self.bytes / self.raw_bytes if self.raw_bytes else 0.0

    def __add__(self, other: LinkReport) -> LinkReport:
        return LinkReport(
            self.payload_bytes + other.payload_bytes,
            self.bytes + other.bytes,
            self.raw_bytes + other.raw_bytes,
            self.frames + other.frames,
            self.seconds + other.seconds,
        )


class Scalars(Mapping[str, float]):
    """Numbers by name. They may still be on a device: one is fetched when it is read.

    >>> Scalars(("loss",), [0.5])["loss"]
    0.5
    """

    def __init__(self, names: Sequence[str] = (), values: Sequence[Any] = ()) -> None:
        self._held = dict(zip(names, values, strict=True))

    def __getitem__(self, name: str) -> float:
        return float(self._held[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class RunTotals:
    """All steps of the run together."""

    steps: int = 0
    seconds: float = 0.0
    links: Mapping[str, LinkReport] = field(default_factory=dict)


@dataclass(frozen=True)
class Elsewhere:
    """What the other processes of the run told of the step before: it came with the sheets that began this one."""

    stages: Mapping[str, StageReport] = field(default_factory=dict)
    links: Mapping[str, LinkReport] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The last step: its stages in order, its links as "a->b", what was predicted, and the run's totals.

    `scalars` are the single numbers that the step returned, its loss and metrics; `worker` is the process that
    reports, and `time` when the step ended, in seconds since 1970. In a run of several processes `stages` and `links`
    are this one's own; what is known of the others is `elsewhere`. `meetings` is there where clusters train apart.
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
    run: RunTotals = RunTotals()
    scalars: Mapping[str, float] = field(default_factory=Scalars)
    worker: str = ALONE
    time: float = 0.0
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    boundaries: Mapping[str, BoundaryReport] = field(default_factory=dict)
    meetings: MeetingsReport | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "links", "boundaries"):
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
        from whale_nebula.report.bottleneck import sentence

        return sentence(self) if self.worker == ALONE else f"as {self.worker} sees it, {sentence(self)}"

    @cached_property
    def straggler(self) -> str:
        """Which replica of a stage the others wait for, how long, and what would help, in a sentence; empty where none
        is much slower than the others.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).straggler
        ''
        """
        from whale_nebula.report.straggler import sentence

        return sentence(self)

    def timeline(self) -> tuple[Span, ...]:
        """What ran when, in seconds from the start of the step: a tuple of spans, which prints as a drawing."""
        from whale_nebula.report.timeline import Timeline

        return Timeline(self.spans)

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline as trace events, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        >>> Report("fit", 1, 0.5, 1, {"gpu": StageReport()}, {}).to_chrome_trace()["displayTimeUnit"]
        'ms'
        """
        from whale_nebula.report.trace import chrome_trace

        return chrome_trace(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_chrome_trace()` to a file that Perfetto opens."""
        from whale_nebula.report.saved import write

        write(path, self.to_chrome_trace(), indent=None)

    def to_json(self) -> str:
        """The report on one line of JSON, as the metrics file has it, with the spans besides.

        >>> Report("fit", 1, 0.5, 1, {}, {}).to_json()[:30]
        '{"format":"whale_nebula report'
        """
        from whale_nebula.report.saved import text

        return text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON: `whale-nebula show --report FILE` prints it, and `Report.load` reads it."""
        from whale_nebula.report.saved import save

        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote; of a metrics file, the last step."""
        from whale_nebula.report.loaded import load

        return load(path)[-1]

    def __str__(self) -> str:
        from whale_nebula.report.text import report_text

        return report_text(self)
