"""Goodput: a run's time by purpose (new steps, saving, lost steps, restarts)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from whale_nebula.report.records import duration


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run since its first step, including earlier starts: in steps that count, in waiting for saving, in
    steps that were lost by a failure, and from a failure to the next step. The rest is spent by the script: data,
    callbacks, evaluation.

    >>> Goodput(100.0, steps=80.0, saving=1.0, lost=4.0, recovery=5.0).other
    10.0
    """

    total: float = 0.0
    steps: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    recovery: float = 0.0

    @property
    def other(self) -> float:
        """Seconds with none of these purposes."""
        return max(0.0, self.total - self.steps - self.saving - self.lost - self.recovery)

    @property
    def share(self) -> float:
        """The share of the time that was not spent on saving, or by failures.

        >>> Goodput(100.0, steps=80.0, saving=1.0, lost=4.0, recovery=5.0).share
        0.9
        """
        return 1.0 - (self.saving + self.lost + self.recovery) / self.total if self.total > 0 else 1.0


def goodput_lines(goodput: Goodput) -> Iterator[str]:
    """The line of a report.

    >>> print(*goodput_lines(Goodput(100.0, steps=80.0, saving=1.0, lost=4.0, recovery=5.0)))
    goodput: 90.0 % of 100.000 s; saving 1.000 s, lost steps 4.000 s, starting again 5.000 s
    """
    told = f"saving {duration(goodput.saving)}"
    if goodput.lost or goodput.recovery:
        told += f", lost steps {duration(goodput.lost)}, starting again {duration(goodput.recovery)}"
    yield f"goodput: {100 * goodput.share:.1f} % of {duration(goodput.total)}; {told}"


@dataclass
class Spent:
    """Counts a run's time by purpose, over all its starts. `before` is a checkpoint's count of earlier starts; `ended`
    is when the last of them ended, in seconds since 1970, if a launcher has observed it.
    """

    ended: float | None = None
    before: Goodput = field(default_factory=Goodput)
    _now: Goodput = field(default_factory=Goodput)
    _began: float | None = None

    def resume(self, before: Goodput, at: float) -> None:
        """Resume from a checkpoint taken at the moment `at`, if known: work after it is lost."""
        self.before = before
        if self.ended is not None and at:
            self._now = replace(self._now, lost=max(0.0, self.ended - at))

    def begin(self) -> None:
        """Record that a step begins; the first one ends the recovery."""
        if self._began is None:
            self._began = time.monotonic()
            if self.ended is not None and self.before.total:
                self._now = replace(self._now, recovery=max(0.0, time.time() - self.ended))

    @contextlib.contextmanager
    def count_step(self) -> Iterator[None]:
        """Context around a step."""
        began = time.monotonic()
        yield
        self._now = replace(self._now, steps=self._now.steps + time.monotonic() - began)

    @contextlib.contextmanager
    def count_saving(self) -> Iterator[None]:
        """Context around the part of saving for which training waits."""
        began = time.monotonic()
        yield
        self._now = replace(self._now, saving=self._now.saving + time.monotonic() - began)

    def sum_up(self) -> Goodput:
        """The sum over all starts."""
        passed = 0.0 if self._began is None else time.monotonic() - self._began
        now = replace(self._now, total=passed + self._now.lost + self._now.recovery)
        return Goodput(
            *(mine + theirs for mine, theirs in zip(asdict(now).values(), asdict(self.before).values(), strict=True))
        )
