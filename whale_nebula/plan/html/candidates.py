"""The planner's candidates in a plan's page: a table, and seconds of a step by the rate of the lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from whale_nebula.plan.html import Markup, element, join_markup
from whale_nebula.plan.records import RateCurves
from whale_nebula.plan.timing import duration
from whale_nebula.report.records import size

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

HEAD = ("", "a step", "of best", "micro-batches", "most memory", "on lines a step", "waits for", "stages")
WIDTH, HEIGHT = 920, 330
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 54


def candidate_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The rows of the table of candidates, the chosen one first."""
    best = plan.considered[0].predicted.seconds
    return [
        (
            str(number), duration(each.predicted.seconds), f"{each.predicted.seconds / best:.2f}",
            str(each.micro_batches), size(max(each.predicted.memory.values())),
            size(sum(each.predicted.bytes.values())), each.binds, each.stages,
        )
        for number, each in enumerate(plan.considered, 1)
    ]  # fmt: skip


def draw_curves(plan: Plan) -> Markup:
    """The plot with its legend; empty if all lines are free, or for a plan from a file."""
    curves = plan.decision.curves() if plan.decision is not None else None
    if curves is None:
        return Markup()
    keys = [element("span", "the best plan at each rate", class_="key best")]
    keys += [element("span", f"{number}: {name}", class_=f"key c{number}") for number, name in _number_plans(curves)]
    rows = [
        (f"{_times(factor)}", duration(seconds), name)
        for factor, seconds, name in zip(curves.factors, curves.best, curves.best_plans, strict=True)
        if _is_power(factor)
    ]
    return join_markup(
        element("p", "Seconds of a step where all lines were so many times as fast; both axes are logarithmic.",
                class_="note"),
        element("div", _plot(curves), class_="clocks"),
        element("p", keys, class_="legend"),
        element("details", element("summary", "the best plan at each rate, as a table"), _rows(rows)),
    )  # fmt: skip


def _number_plans(curves: RateCurves) -> Iterator[tuple[int, str]]:
    return enumerate(curves.plans, 1)


def _rows(rows: Sequence[tuple[str, ...]]) -> Markup:
    lines = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    head = element("tr", [element("th", text, scope="col") for text in ("rate", "a step", "plan")])
    return element("table", element("thead", head), element("tbody", lines))


# ---------------------------------------------------------------------- the plot
def _plot(curves: RateCurves) -> Markup:
    """The curves as SVG: the best plan as a broad band, the candidates as lines on it."""
    every = [each for line in (curves.best, *curves.plans.values()) for each in line if math.isfinite(each)]
    margin = max(1.1, math.sqrt(1.6 * min(every) / max(every)))
    low, high = min(every) / margin, max(every) * margin
    first, last = math.log(curves.factors[0]), math.log(curves.factors[-1])

    def x(factor: float) -> float:
        return LEFT + (math.log(factor) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(seconds: float) -> float:
        return TOP + (math.log(high) - math.log(seconds)) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)

    def line(values: Sequence[float], kind: str, title: str) -> Markup:
        points = [(x(f), y(v)) for f, v in zip(curves.factors, values, strict=True) if math.isfinite(v)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        return element("path", element("title", title), d=path, class_=kind)

    drawn = [
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="tick") for tick in _ticks(low, high)
    ]
    drawn += [
        element("text", duration(tick), x=LEFT - 10, y=y(tick) + 4, class_="tick end") for tick in _ticks(low, high)
    ]
    for factor in filter(_is_power, curves.factors):
        kind = "tick now" if factor == 1 else "tick"
        drawn.append(element("line", x1=x(factor), x2=x(factor), y1=TOP, y2=HEIGHT - BOTTOM, class_=kind))
        place = "end" if factor == curves.factors[-1] else "middle"
        drawn.append(element("text", _times(factor), x=x(factor), y=HEIGHT - BOTTOM + 18, class_=f"tick {place}"))
        if curves.rate is not None:
            said = f"{curves.rate * factor / 1e6:.4g} Mbit/s"
            drawn.append(element("text", said, x=x(factor), y=HEIGHT - BOTTOM + 34, class_=f"tick {place}"))
    drawn.append(element("text", "rate of the lines", x=LEFT, y=HEIGHT - 3, class_="tick"))
    drawn.append(line(curves.best, "best", "the best plan at each rate"))
    drawn += [
        line(curves.plans[name], f"curve c{number}", f"{number}: {name}") for number, name in _number_plans(curves)
    ]
    for factor, seconds, name in zip(curves.factors, curves.best, curves.best_plans, strict=True):
        if _is_power(factor) and math.isfinite(seconds):
            title = element("title", f"{_times(factor)}: {duration(seconds)}, {name}")
            drawn.append(element("circle", title, cx=x(factor), cy=y(seconds), r=4, class_="best"))
    label = "seconds of a step by the rate of the lines, of the best candidates"
    return element("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="clock curves", role="img", aria_label=label)


def _is_power(factor: float) -> bool:
    return math.log2(factor).is_integer()


def _times(factor: float) -> str:
    """Format a multiple of the configured rate.

    >>> _times(0.125), _times(1.0), _times(8.0)
    ('1/8', 'as configured', '8 times')
    """
    if factor == 1:
        return "as configured"
    return f"1/{1 / factor:g}" if factor < 1 else f"{factor:g} times"


_STEPS = ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), (1, 1.2, 1.4, 1.6, 2, 2.4, 2.8, 3.2, 4, 4.8, 5.6, 6.4, 8))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, at least three of them if possible.

    >>> _ticks(0.03, 0.6), _ticks(0.09, 0.15)
    ([0.05, 0.1, 0.2, 0.5], [0.1, 0.12, 0.14])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in _STEPS:
        found = [each for power in powers for step in steps if low <= (each := float(f"{step}e{power}")) <= high]
        if len(found) >= 3:
            break
    return found
