"""The schedule of a plan as SVG: a row for each stage and link, time from left to right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whale_nebula.plan.html import Markup, element, join_markup
from whale_nebula.plan.html.graph import color
from whale_nebula.plan.timing import Assumptions, PhaseTimes, Row, duration, predict_times, step_text
from whale_nebula.schedule.simulate import Span

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

_ROW, _LINE, _GAP, _HEAD = 30, 18, 7, 26
_WIDTH, _MARGIN = 1180, 128
_BLOCKS = 480
"""The approximate number of blocks of stages that are drawn, with at most `_MOST` micro-batches."""
_MOST = 24


def draw_schedule(plan: Plan) -> Markup:
    """The schedule as the plan's text assumes it, with the assumption and its result."""
    drawn = predict_times(plan, most=max(4, min(_MOST, _BLOCKS // max(len(plan.stages), 1))))
    notes = [str(drawn.assumed)]
    if drawn.micro_batches < len(plan.rows):
        notes.append(f"the first {drawn.micro_batches} of {len(plan.rows)} micro-batches")
    if drawn.assumed.timed:
        notes.append(step_text(plan))
    figures = [_Clock(plan, phase, drawn.assumed).figure(len(drawn.phases) > 1) for phase in drawn.phases]
    clocks = element("div", figures, class_="scroll clocks", tabindex=0, role="region", aria_label="schedule")
    return join_markup(element("p", " ".join(f"{n[:1].upper()}{n[1:]}." for n in notes), class_="note"), clocks)


@dataclass(frozen=True)
class _Clock:
    """The drawing of one phase."""

    plan: Plan
    phase: PhaseTimes
    assumptions: Assumptions

    @property
    def end(self) -> float:
        return max((span.end for span in self.phase.timeline.spans), default=1.0) or 1.0

    def x(self, seconds: float) -> float:
        return _MARGIN + seconds * _WIDTH / self.end

    def when(self, seconds: float) -> str:
        if not self.assumptions.timed:
            return f"{seconds:g}"
        return duration(seconds) if seconds else "0"

    def figure(self, several: bool) -> Markup:
        label, y, rows = f"Phase {self.phase.phase}" if several else "Schedule", _HEAD, []
        for row in self.phase.rows(lines=self.assumptions.timed):
            height = _LINE if row.stage is None else _ROW
            rows.append(self.row(row, y, height))
            y += height + _GAP
        height, said = y + 6, f"{label}: {self.assumptions}"
        size = f"0 0 {_MARGIN + _WIDTH + 16} {height}"
        drawn = element("svg", self.axis(height), rows, class_="clock", viewBox=size, role="img", aria_label=said)
        return element("figure", element("figcaption", label) if several else None, drawn, class_="time")

    def row(self, row: Row, y: int, height: int) -> Markup:
        name = row.name if row.stage is not None else row.name.replace("->", " → ")
        label = name if len(name) < 17 else f"{name[:15]}…"
        return element(
            "g",
            element("text", label, class_="row end", x=_MARGIN - 12, y=y + height / 2 + 4),
            element("rect", class_="rest", x=_MARGIN, y=y, width=_WIDTH, height=height, rx=4),
            [self.block(span, y, height) for span in row.spans if span.seconds or row.stage is None],
            class_="wire" if row.stage is None else f"c{color(self.plan, row.stage.cluster)}",
        )

    def block(self, span: Span, y: int, height: int) -> Markup:
        x, width = self.x(span.start), max(self.x(span.end) - self.x(span.start) - 1.0, 1.5)
        name = f"{span.what}{span.micro_batch}"
        text = element("text", name, class_="middle", x=round(x + width / 2, 1), y=y + height / 2 + 4)
        return element(
            "g",
            element("rect", x=round(x, 2), y=y, width=round(width, 2), height=height, rx=min(4, width / 2)),
            text if width > 7 * len(name) + 4 else None,
            class_=span.what.lower(),
            data_t=f"{name} · {self.when(span.start)} to {self.when(span.end)}",
            data_m=span.micro_batch,
        )

    def axis(self, height: float) -> list[Markup]:
        """Ticks at round times: multiples of the first of 1, 2, 5, 10 ... above an eighth of the total."""
        least = self.end / 8
        power = 10.0 ** math.floor(math.log10(least))
        step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= least * (1 - 1e-9))
        ticks = []
        for number in range(int(self.end / step + 1e-9) + 1):
            x, when = self.x(number * step), self.when(number * step)
            ticks.append(element("path", class_="tick", d=f"M{x:g} {_HEAD - 6}V{height - 4:g}"))
            ticks.append(element("text", when, class_="tick middle", x=round(x, 1), y=13))
        return ticks
