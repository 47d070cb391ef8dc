"""What the time of a run went to: new steps, saving, steps that were lost, and starting again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whale_nebula.report.records import duration


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run since its first step, with all that went before this start of it: in steps that count, for which
    training waited while values were saved, in steps that were undone by a failure, and from a failure to the next
    step. The rest is the script's: data, callbacks, evaluation.

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
        """What is none of these."""
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
