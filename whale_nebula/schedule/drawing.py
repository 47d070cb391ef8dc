"""Draw a timeline as text: one row per stage, time from left to right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from whale_nebula.schedule.lines import Work, uniform
from whale_nebula.schedule.simulate import Span, Timeline, simulate

IDLE = "."
FILL = {"F": "-", "B": "=", "W": "~"}
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ROUNDING = 1e-9
Row = tuple[int | str, int]
"""The key of a row: a replica of a stage, or a line."""


def draw(timeline: Timeline, *, width: int = 100, lines: bool = False) -> str:
    """Draw a timeline: "F0-" is a forward, "B0==" a backward, "W0~" gradients of weights in a function of their own,
    dots are waiting; `lines` adds a row for each line.

    It is at most `width` columns wide. If that is too narrow for names, a block begins with the micro-batch as one
    digit (10 is "a"): "0-" is a forward, "0=" a backward, "0~" gradients of weights. A block is at least one column
    wide.

    >>> timeline = simulate([Work(1.0, 2.0)] * 2, uniform(2, seconds=1.0), 2)
    >>> print(draw(timeline, lines=True))
    stage 0 |F0-F1-............B0====...B1====|
    stage 1 |......F0-B0====F1-B1====.........|
    0->1    |...F0-F1-........................|
    1->0    |...............B0=......B1=......|
    """
    own = [(stage, replica) for stage in range(timeline.stages) for replica in timeline.replicas(stage)]
    rows_of: list[Row] = [*own, *((line, 0) for line in timeline.lines if lines)]
    names = [_title(*row, timeline) for row in rows_of]
    margin = max(map(len, names))
    shown = [span for span in timeline.spans if _row(span) in rows_of and (span.seconds or _message(span))]
    room = max(width - margin - 3, 1)
    scale = _scale(shown, room)
    rows = _rows(shown, rows_of, scale, min(_columns(shown, scale), room))
    return "\n".join(f"{name:<{margin}} |{row}|" for name, row in zip(names, rows, strict=True))


def _row(span: Span) -> Row:
    return span.place, span.replica


def _title(place: int | str, replica: int, timeline: Timeline) -> str:
    if isinstance(place, str):
        return place
    return f"stage {place}.{replica}" if len(timeline.replicas(place)) > 1 else f"stage {place}"


def picture(name: str, *, stages: int, micro_batches: int, seconds: float = 0.0, width: int = 100) -> str:
    """Draw a schedule where a forward takes 1, a backward 2, and a message holds the line for `seconds`. Each part
    of a divided backward takes 1; the first stage sends no gradient back, so its backward is not divided.

    >>> print(picture("1f1b", stages=2, micro_batches=3))
    stage 0 |F0-F1-......B0====F2-B1====...B2====|
    stage 1 |...F0-B0====F1-B1====F2-B2====......|
    """
    works = [Work(1.0, 2.0), *[Work(1.0, 1.0, weights=1.0)] * (stages - 1)]
    return draw(simulate(works, uniform(stages, seconds=seconds), micro_batches, name=name), width=width)


def _message(span: Span) -> bool:
    return isinstance(span.place, str)


def _scale(spans: Sequence[Span], columns: int) -> float:
    """Columns a second: whole columns for the shortest span, up to its name and one more.

    If messages are too short for that, for the shortest span of a stage.
    """
    room = columns / (max((span.end for span in spans), default=0.0) or 1.0)
    for own in (spans, [span for span in spans if not _message(span)]):
        shortest = min((span.seconds for span in own if span.seconds), default=0.0)
        whole = min(math.floor(room * shortest + _ROUNDING), _longest(spans) + 1)
        if whole:
            return whole / shortest
    return room


def _columns(spans: Sequence[Span], scale: float) -> int:
    """The number of columns: as the time requires, or the row with the most blocks."""
    blocks = Counter(map(_row, spans)).values()
    return max([0, *blocks, *(_column(span.end, scale) for span in spans)])


def _rows(spans: Sequence[Span], places: Sequence[Row], scale: float, columns: int) -> Iterator[str]:
    """Draw the rows; names of blocks are shown in all rows of stages or in none, and likewise for lines."""
    enough = _longest(spans) - _ROUNDING
    named = {kind: all(s.seconds * scale >= enough for s in spans if _message(s) is kind) for kind in (False, True)}
    for place in places:
        own = sorted((span for span in spans if _row(span) == place), key=lambda span: span.start)
        row = [IDLE] * columns
        for span, (start, stop) in zip(own, _blocks(own, scale, columns), strict=True):
            room = stop - start
            row[start:stop] = _block(span, room, named[_message(span)] and room >= len(_name(span)))
        yield "".join(row)


def _blocks(spans: Sequence[Span], scale: float, columns: int) -> Iterator[tuple[int, int]]:
    """The columns of each span of a row: at least one each, without overlap as long as there is room."""
    after = 0
    for left, span in zip(range(len(spans), 0, -1), spans, strict=True):
        start = max(min(max(_column(span.start, scale), after), columns - left), 0)
        after = min(max(_column(span.end, scale), start + 1), columns)
        yield start, after


def _column(seconds: float, scale: float) -> int:
    return math.floor(seconds * scale + 0.5 + _ROUNDING)


def _block(span: Span, width: int, named: bool) -> str:
    fill = FILL[span.what]
    if named:
        return _name(span).ljust(width, fill)[:width]
    digit = DIGITS[span.micro_batch] if span.micro_batch < len(DIGITS) else fill
    return (fill if width == 1 and span.what != "F" else digit).ljust(width, fill)[:width]


def _longest(spans: Sequence[Span]) -> int:
    return max((len(_name(span)) for span in spans), default=0)


def _name(span: Span) -> str:
    return f"{span.what}{span.micro_batch}"
