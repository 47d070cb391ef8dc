"""What is known of a step before it begins, from those before it: how fast lines are, and how long stages compute."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.config import Links
from whale_nebula.report.records import Span
from whale_nebula.runtime.channels.auto import Outlook
from whale_nebula.runtime.pace import Medians

_RECENT = 10  # steps
LARGE = 1 << 18
"""Bytes whose writing says something of a real line: what is less, the system's buffers take at once."""
CLOSE = 0.5e-3
"""Seconds between two messages that are written one right after the other: the second waited for the first."""


@dataclass
class Seen:
    """What the links from here, by their names, have carried in the last steps, and how long that held them.

    On emulated lines that is `exact`. On a real one a rate is told only by many bytes that were written one right after
    the other, in one message or in several that waited for each other: for bytes to leave, and not for a delay. The
    last that was told stays until others are sent; as some of them go into buffers, too, what the config says is
    believed where it is less. Where none was told the config is all there is.

    >>> seen = Seen(("gpu->npu",), Links(), exact=True)
    >>> seen.add([Span("gpu->npu", "forward 0", 0.0, 0.5, 0, 0, 3_000_000)])
    >>> seen.outlook([8, 8], {"0.0.forward": 0.25}).rates
    {'gpu->npu': 6000000.0}
    """

    names: Sequence[str]
    lines: Links
    exact: bool = False
    _carried: Mapping[str, int] = field(default_factory=dict)
    _told: dict[str, deque[Span]] = field(default_factory=dict)

    def add(self, spans: Sequence[Span]) -> None:
        """A step has ended in which these messages held their lines."""
        sent = {name: [span for span in spans if span.lane == name] for name in self.names}
        self._carried = {name: sum(span.bytes or 0 for span in own) for name, own in sent.items()}
        for name, own in sent.items():
            runs = own if self.exact else map(_whole, _runs(own))
            telling = [run for run in runs if self.exact or (run.bytes or 0) >= LARGE]
            if telling:
                self._told.setdefault(name, deque(maxlen=_RECENT)).append(_together(telling))

    def outlook(self, rows: Sequence[int], medians: Medians) -> Outlook:
        """Before a step whose micro-batches have these rows."""
        rates = {name: rate for name in self.names if (rate := self._rate(name))}
        unseen = {name for name, size in self._carried.items() if size and name not in self._told}
        return Outlook(rows, slowest(medians, len(rows)), rates, self._carried, frozenset(unseen))

    def _rate(self, name: str) -> float | None:
        """Bytes a second; None where nothing is known, or the line is as fast as memory."""
        told = _together(self._told.get(name, ()))
        written = (told.bytes or 0) / told.end if told.end else None
        if written is not None and self.exact:
            return written
        bits = self.lines.between(*name.split("->")).rate
        return min((rate for rate in (written, bits / 8 if bits else None) if rate), default=None)


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Messages of a line that were written one right after the other."""
    run: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        if run and span.start - run[-1].end > CLOSE:
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _whole(run: Sequence[Span]) -> Span:
    """One message in place of several."""
    return Span("", "", run[0].start, run[-1].end, bytes=sum(span.bytes or 0 for span in run))


def _together(spans: Iterable[Span]) -> Span:
    """One message that takes as long, and is as large, as these."""
    found = [(span.end - span.start, span.bytes or 0) for span in spans]
    return Span("", "", 0.0, sum(took for took, _ in found), bytes=sum(size for _, size in found))


def slowest(medians: Medians, micro_batches: int) -> float | None:
    """Seconds that the slowest stage computes a step; None before anything was measured.

    >>> slowest({"0.0.forward": 0.25, "0.0.backward": 0.5, "0.1.fused": 0.5, "once": 9.0}, micro_batches=4)
    3.0
    """
    found: defaultdict[str, float] = defaultdict(float)
    for what, seconds in medians.items():
        parts = what.split(".")
        if len(parts) == 3:
            found[parts[1]] += micro_batches * seconds
    return max(found.values(), default=None)
