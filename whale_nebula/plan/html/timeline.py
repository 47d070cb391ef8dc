"""The schedule of a plan as SVG: a row for each stage and line, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whale_nebula.ir.routing import row_name
from whale_nebula.plan.html.graph import color
from whale_nebula.plan.html.markup import Markup, element
from whale_nebula.plan.timing import (
    SPEED,
    Assumed,
    PhaseTimes,
    Times,
    as_long_as_a_message,
    assumptions_of,
    duration,
    speed_text,
    step_text,
    times,
)
from whale_nebula.schedule import Span

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

_ROW, _LINE, _GAP, _HEAD = 30, 18, 7, 26
_WIDTH, _MARGIN = 1180, 128
_BLOCKS = 480
"""About so many blocks of stages are drawn, and of micro-batches never more than `_MOST`."""
_MOST = 24


@dataclass(frozen=True)
class Scene:
    """One drawing of the schedule: what it takes for granted, and what comes of it."""

    title: str
    note: str
    drawings: tuple[Markup, ...]


def scenes(plan: Plan) -> list[Scene]:
    """The schedule under the plan's own assumption, and under others that a reader may find nearer to the truth."""
    return [_scene(plan, title, given) for title, given in _choices(plan)]


def _choices(plan: Plan) -> Iterator[tuple[str, Assumed]]:
    base = assumptions_of(plan)
    counted = len({stage.flops for stage in plan.stages.values()}) > 1
    if not base.timed:
        yield "as the others do", base
        if counted:
            yield "by its FLOPs", Assumed(by_flops=True)
        return
    speed = base.speed or SPEED
    yield speed_text(speed), base
    yield speed_text(speed * 10), Assumed(speed * 10)
    yield speed_text(speed / 10), Assumed(speed / 10)
    yield "as long as a message takes", as_long_as_a_message(plan)


def _scene(plan: Plan, title: str, given: Assumed) -> Scene:
    most = max(4, min(_MOST, _BLOCKS // max(len(plan.stages), 1)))
    drawn = times(plan, given, most=most)
    note = _sentence(str(given))
    if drawn.micro_batches < len(plan.rows):
        note += f" The first {drawn.micro_batches} of {len(plan.rows)} micro-batches."
    if given.timed:
        note += f" {_sentence(step_text(plan, given))}"
    return Scene(title, note, tuple(_drawing(plan, drawn, phase) for phase in drawn.phases))


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _drawing(plan: Plan, drawn: Times, phase: PhaseTimes) -> Markup:
    lines = phase.timeline.lines if drawn.assumed.timed else ()
    rows = sum(len(phase.timeline.replicas(place)) for place in range(len(phase.stages)))
    height = _HEAD + rows * (_ROW + _GAP) + len(lines) * (_LINE + _GAP) + 6
    scale = _WIDTH / (max((span.end for span in phase.timeline.spans), default=1.0) or 1.0)
    several = len({stage.runs for stage in plan.stages.values()} and plan.stages) and len(drawn.phases) > 1
    label = f"Phase {phase.phase}" if several else "Schedule"
    return element(
        "figure",
        element("figcaption", label) if several else None,
        element(
            "svg",
            list(_axis(phase, scale, height, drawn.assumed.timed)),
            list(_rows(plan, phase, lines, scale, drawn.assumed.timed)),
            class_="clock",
            viewBox=f"0 0 {_MARGIN + _WIDTH + 16} {height}",
            role="img",
            aria_label=f"{label}: {drawn.assumed}",
        ),
        class_="time",
    )


def _rows(plan: Plan, phase: PhaseTimes, lines: tuple[str, ...], scale: float, timed: bool) -> Iterator[Markup]:
    y = float(_HEAD)
    for place, stage in enumerate(phase.stages):
        for replica in phase.timeline.replicas(place):
            name = row_name(stage.name, stage.replicas, replica)
            yield _row(phase, (place, replica), name, y, _ROW, scale, f"c{color(plan, stage.cluster)}", timed)
            y += _ROW + _GAP
    for line in lines:
        yield _row(phase, (line, 0), line.replace("->", " → "), y, _LINE, scale, "wire", timed)
        y += _LINE + _GAP


def _row(
    phase: PhaseTimes,
    place: tuple[int | str, int],
    name: str,
    y: float,
    height: int,
    scale: float,
    class_: str,
    timed: bool,
) -> Markup:
    spans = [span for span in phase.timeline.of(*place) if span.seconds or isinstance(span.place, str)]
    label = name if len(name) < 17 else f"{name[:15]}…"
    return element(
        "g",
        element("text", label, class_="row end", x=_MARGIN - 12, y=y + height / 2 + 4),
        element("rect", class_="rest", x=_MARGIN, y=y, width=_WIDTH, height=height, rx=4),
        [_block(span, y, height, scale, timed) for span in spans],
        class_=class_,
    )


def _block(span: Span, y: float, height: int, scale: float, timed: bool) -> Markup:
    x, width = _MARGIN + span.start * scale, max(span.seconds * scale - 1.0, 1.5)
    name = f"{span.what}{span.micro_batch}"
    said = f"{name} · {_when(span.start, timed)} to {_when(span.end, timed)}"
    text = element("text", name, class_="middle", x=round(x + width / 2, 1), y=y + height / 2 + 4)
    return element(
        "g",
        element("rect", x=round(x, 2), y=y, width=round(width, 2), height=height, rx=min(4, width / 2)),
        text if width > 7 * len(name) + 4 else None,
        class_="f" if span.what == "F" else "b",
        data_t=said,
        data_m=span.micro_batch,
    )


def _axis(phase: PhaseTimes, scale: float, height: float, timed: bool) -> Iterator[Markup]:
    """Ticks at round times."""
    end = max((span.end for span in phase.timeline.spans), default=1.0) or 1.0
    step = _nice(end / 8)
    for number in range(int(end / step + 1e-9) + 1):
        x = _MARGIN + number * step * scale
        yield element("path", class_="tick", d=f"M{x:g} {_HEAD - 6}V{height - 4:g}")
        yield element("text", _when(number * step, timed), class_="tick middle", x=round(x, 1), y=13)


def _nice(seconds: float) -> float:
    """The next of 1, 2, 5, 10 ... above."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(unit * power for unit in (1, 2, 5, 10) if unit * power >= seconds * (1 - 1e-9))


def _when(seconds: float, timed: bool) -> str:
    return ("0" if not seconds else duration(seconds)) if timed else f"{seconds:g}"
