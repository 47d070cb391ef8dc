"""What running a step gives, beside its results: what the report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.report.prediction import Basis
from whale_nebula.report.records import BoundaryReport, Elsewhere, LinkReport, MeetingsReport, Span, StageReport
from whale_nebula.runtime.channels.told import Said


@dataclass(frozen=True)
class StepOutcome:
    """The tensors that the step returns, and what was measured on the way."""

    tensors: Sequence[Any]
    seconds: float
    counts: Sequence[int]
    stages: Mapping[str, StageReport] = field(default_factory=dict)
    links: Mapping[str, LinkReport] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    basis: Basis | None = None
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    boundaries: Mapping[str, BoundaryReport] = field(default_factory=dict)
    said: Said = field(default_factory=Said)
    notes: tuple[str, ...] = ()
    meetings: MeetingsReport | None = None
