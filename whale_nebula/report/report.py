"""The report of a step: seconds by stage, bytes by link, and the totals of the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from whale_nebula.errors import StateError


@dataclass(frozen=True)
class Span:
    """Something that took time: a stage's forward of a micro-batch, a wait, a message on a link."""

    lane: str
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class StageReport:
    """A stage in a step. Seconds are None where the step ran as one function and stages were not timed apart."""

    compute_seconds: float | None = None
    wait_seconds: float | None = None


@dataclass(frozen=True)
class LinkReport:
    """Everything that workers of one cluster sent to workers of another in a step.

    >>> LinkReport(payload_bytes=50, bytes=60, raw_bytes=120).ratio
    0.5
    """

    payload_bytes: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    frames: int = 0

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
        )


@dataclass(frozen=True)
class RunTotals:
    """All steps of the run together."""

    steps: int = 0
    seconds: float = 0.0
    links: Mapping[str, LinkReport] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The last step: its stages in order, its links as "a->b", what was predicted, and the run's totals."""

    program: str
    step: int
    step_seconds: float
    micro_batches: int
    stages: Mapping[str, StageReport]
    links: Mapping[str, LinkReport]
    spans: tuple[Span, ...] = ()
    predicted_seconds: float | None = None
    notes: tuple[str, ...] = ()
    run: RunTotals = RunTotals()

    def timeline(self) -> tuple[Span, ...]:
        """What ran when, in seconds from the start of the step."""
        return self.spans

    def __str__(self) -> str:
        from whale_nebula.report.text import report_text

        return report_text(self)


_LOCK = threading.Lock()
_last: Report | None = None


def publish(report: Report) -> Report:
    """Make a step's report the last one, and add it to the run's totals."""
    global _last
    with _LOCK:
        before = _last.run if _last is not None else RunTotals()
        links = {name: before.links.get(name, LinkReport()) + link for name, link in report.links.items()}
        totals = RunTotals(before.steps + 1, before.seconds + report.step_seconds, {**before.links, **links})
        _last = replace(report, run=totals)
        return _last


def forget() -> None:
    """Start the totals anew: a run was opened or closed."""
    global _last
    with _LOCK:
        _last = None


def last_report() -> Report:
    """The report of the last step that was run, whatever the program.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    >>> nb.last_report()
    Traceback (most recent call last):
        ...
    whale_nebula.errors.StateError: NB-305 no step has run yet
      mend: run a step first: model.fit(...), or a function under @nb.function
    """
    if _last is None:
        raise StateError(
            "no step has run yet", mend="run a step first: model.fit(...), or a function under @nb.function"
        )
    return _last
