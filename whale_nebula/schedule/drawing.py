"""A timeline as text: one row a stage, time from left to right, the same in docs, plans and reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from whale_nebula.schedule.lines import Work, uniform
from whale_nebula.schedule.simulate import simulate
from whale_nebula.schedule.timeline import Span, Timeline

IDLE = "."
FILL = {"F": "-", "B": "="}
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ROUNDING = 1e-9


def draw(timeline: Timeline, *, width: int = 100, lines: bool = False) -> str:
    """Draw a timeline: "F0-" is a forward, "B0==" a backward, dots are waiting; `lines` adds a row a line.

    It is at most `width` columns wide. Where that is too narrow for names, a block begins with the
    micro-batch as one digit (10 is "a"): "0-" is a forward, "0=" a backward.

    >>> timeline = simulate([Work(1.0, 2.0)] * 2, uniform(2, seconds=1.0), 2)
    >>> print(draw(timeline, lines=True))
    stage 0 |F0-F1-............B0====...B1====|
    stage 1 |......F0-B0====F1-B1====.........|
    0->1    |...F0-F1-........................|
    1->0    |...............B0=......B1=......|
    """
    places: list[int | str] = [*range(timeline.stages), *(timeline.lines if lines else ())]
    names = [f"stage {place}" if isinstance(place, int) else place for place in places]
    margin = max(map(len, names))
    shown = [span for span in timeline.spans if span.place in places and span.seconds > 0.0]
    scale = _scale(shown, max(width - margin - 3, 1))
    rows = _rows(shown, places, scale)
    return "\n".join(f"{name:<{margin}} |{row}|" for name, row in zip(names, rows, strict=True))


def picture(
    name: str,
    *,
    stages: int,
    micro_batches: int,
    seconds: float = 0.0,
    delay: float = 0.0,
    in_flight: int | None = None,
    width: int = 100,
) -> str:
    """Draw a schedule where a forward takes 1, a backward 2, and a message holds the line for `seconds`.

    >>> print(picture("1f1b", stages=2, micro_batches=3))
    stage 0 |F0-F1-......B0====F2-B1====...B2====|
    stage 1 |...F0-B0====F1-B1====F2-B2====......|
    """
    works = [Work(1.0, 2.0)] * stages
    hops = uniform(stages, seconds=seconds, delay=delay)
    return draw(simulate(works, hops, micro_batches, name=name, in_flight=in_flight), width=width)


def _scale(spans: Sequence[Span], columns: int) -> float:
    """Columns a second: whole columns for the shortest span, up to its name and one more."""
    if not spans:
        return 1.0
    shortest = min(span.seconds for span in spans)
    room = columns / max(span.end for span in spans)
    whole = min(math.floor(room * shortest + _ROUNDING), _longest(spans) + 1)
    return whole / shortest if whole else room


def _rows(spans: Sequence[Span], places: Sequence[int | str], scale: float) -> Iterator[str]:
    columns = max((_column(span.end, scale) for span in spans), default=0)
    named = all(span.seconds * scale + _ROUNDING >= _longest(spans) for span in spans)
    for place in places:
        row = [IDLE] * columns
        for span in spans:
            if span.place == place:
                start, stop = _column(span.start, scale), _column(span.end, scale)
                row[start:stop] = _block(span, stop - start, named)
        yield "".join(row)


def _column(seconds: float, scale: float) -> int:
    return math.floor(seconds * scale + 0.5 + _ROUNDING)


def _block(span: Span, width: int, named: bool) -> str:
    fill = FILL[span.what]
    if named:
        return _name(span).ljust(width, fill)[:width]
    digit = DIGITS[span.micro_batch] if span.micro_batch < len(DIGITS) else fill
    return (fill if width == 1 and span.what == "B" else digit).ljust(width, fill)[:width]


def _longest(spans: Sequence[Span]) -> int:
    return max((len(_name(span)) for span in spans), default=0)


def _name(span: Span) -> str:
    return f"{span.what}{span.micro_batch}"
