"""What ran when in a step: the spans themselves, and a drawing of them where they are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whale_nebula.report.text import duration

if TYPE_CHECKING:
    from whale_nebula.report.report import Span

_WIDTH = 72


class Timeline(tuple["Span", ...]):
    """The spans of a step, a tuple; printed it is a line for each lane, with a letter for what ran in it.

    >>> from whale_nebula.report.report import Span
    >>> found = Timeline([Span("gpu", "forward 0", 0.0, 0.25, 0), Span("gpu", "backward 0", 0.75, 1.0, 0)])
    >>> print(str(found).replace("F" * 18, "FF").replace("B" * 18, "BB").replace("." * 36, "...."))
    1.000 s from left to right; F forward, B backward
      gpu |FF....BB|  0.500 s in 2 pieces
    >>> found[0].what
    'forward 0'
    """

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "nothing was timed: over free links a step is one local function"
        whole = max(span.end for span in self) or 1.0
        lanes = list(dict.fromkeys(span.lane for span in self))
        words = dict.fromkeys(span.what.split()[0] for span in self)
        named = ", ".join(f"{_letter(word)} {word}" for word in words)
        wide = max(map(len, lanes))
        lines = [f"  {lane:{wide}} |{self._drawn(lane, whole)}|  {self._said(lane)}" for lane in lanes]
        return "\n".join([f"{duration(whole)} from left to right; {named}", *lines])

    __repr__ = __str__

    def _drawn(self, lane: str, whole: float) -> str:
        columns = ["."] * _WIDTH
        for span in sorted(self._of(lane), key=lambda each: each.start - each.end):  # what lies within is drawn upon it
            first = min(int(span.start / whole * _WIDTH), _WIDTH - 1)
            last = max(first + 1, round(span.end / whole * _WIDTH))
            columns[first:last] = _letter(span.what) * (min(last, _WIDTH) - first)
        return "".join(columns)

    def _said(self, lane: str) -> str:
        own = self._of(lane)
        busy, seen = 0.0, 0.0
        for span in sorted(own, key=lambda each: each.start):  # what lies within another counts once
            busy += max(0.0, span.end - max(seen, span.start))
            seen = max(seen, span.end)
        return f"{duration(busy)} in {len(own)} piece{'s' * (len(own) != 1)}"

    def _of(self, lane: str) -> list[Span]:
        return [span for span in self if span.lane == lane]


def _letter(what: str) -> str:
    return what[:1].upper()
