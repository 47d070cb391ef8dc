"""What a cluster that trains apart says of its meetings with the others, since the run began."""

from __future__ import annotations

from dataclasses import dataclass

_WORTH = 0.05
"""A smaller share of the time is not worth a word."""


@dataclass(frozen=True)
class MeetingsReport:
    """In `steps` steps all weights were exchanged `met` times with the clusters `others`, for which this one has sent
    `sent_bytes` to them. `seconds` are those of the steps since the first meeting, before which steps are traced;
    `waited_seconds` of them went by waiting for the others.

    >>> told = MeetingsReport(("npu",), steps=80, met=9.7, seconds=4.0, waited_seconds=1.0, sent_bytes=2048)
    >>> print(told)
    with npu: 9.7 in 80 steps, sent 2.0 KiB, waited 1.000 s of 4.000 s
    """

    others: tuple[str, ...]
    steps: int
    met: float
    seconds: float
    waited_seconds: float
    sent_bytes: int = 0

    @property
    def share(self) -> float:
        """How much of the time was waited."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    def sentence(self) -> str:
        """What it comes to, and what would help."""
        said = f"{100 * self.share:.0f} % of the time so far was waited for {', '.join(self.others)}"
        if self.share < _WORTH:
            return f"the cluster's own computing; {said}"
        return f"{said}; a smaller codec, a larger sync_every or delay, or speeds in the config would hide more of it"

    def __str__(self) -> str:
        from whale_nebula.report.text import duration, size

        waited = f"waited {duration(self.waited_seconds)} of {duration(self.seconds)}"
        sent = f"sent {size(self.sent_bytes)}"
        return f"with {', '.join(self.others)}: {self.met:.4g} in {self.steps} steps, {sent}, {waited}"
