"""What ran when in a step: the spans themselves, and a drawing of them where they are printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from whale_nebula.report.text import duration

if TYPE_CHECKING:
    from whale_nebula.report.report import Span

_WIDTH = 72
_OTHERS = "0123456789"


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
        letters = _letters(dict.fromkeys(_word(span) for span in self))
        named = ", ".join(f"{letter} {word}" for word, letter in letters.items())
        wide = max(map(len, lanes))
        lines = [f"  {lane:{wide}} |{self._drawn(lane, whole, letters)}|  {self._said(lane)}" for lane in lanes]
        return "\n".join([f"{duration(whole)} from left to right; {named}", *lines])

    __repr__ = __str__

    def _drawn(self, lane: str, whole: float, letters: Mapping[str, str]) -> str:
        columns = ["."] * _WIDTH
        for span in sorted(self._of(lane), key=lambda each: each.start - each.end):  # what lies within is drawn upon it
            first = min(int(span.start / whole * _WIDTH), _WIDTH - 1)
            last = max(first + 1, round(span.end / whole * _WIDTH))
            columns[first:last] = letters[_word(span)] * (min(last, _WIDTH) - first)
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


def _word(span: Span) -> str:
    return span.what.split()[0]


def _letters(words: Iterable[str]) -> dict[str, str]:
    """A letter for each word, from the word itself as far as no other has it.

    >>> _letters(["forward", "encode", "evaluate", "fee"])
    {'forward': 'F', 'encode': 'E', 'evaluate': 'V', 'fee': 'f'}
    """
    found: dict[str, str] = {}
    for word in words:
        free = (each for each in [*word.upper(), *word, *_OTHERS] if each not in found.values())
        found[word] = next(free, "*")
    return found
