"""Clusters that train apart leave together, at a meeting: who is asked to end says at which step, and all end there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.errors import DeadlineError
from whale_nebula.launch.leaving import departure
from whale_nebula.transport.protocol import Link

_KIND = "LEAVING"


@dataclass
class LeavesTogether:
    """What one worker knows of it. `apart` is how many rounds another may be ahead.

    Nobody passes the end of the next but one meeting (and as many rounds more) without having heard what this worker
    had to say before it: so that is where all leave. Where several are asked, the first of these steps counts.
    """

    worker: str
    links: Mapping[str, Link]
    every: int
    apart: int = 0
    _at: int | None = None
    _why: dict[str, str] = field(default_factory=dict)
    _told: bool = False

    def look(self, steps: int) -> None:
        """Before a step, after so many: say that this worker was asked to, and hear who else was. Raises where a peer
        is gone, and where all have agreed to leave.
        """
        departure.begin()
        if departure.asked is not None and not self._told:
            self._told = True
            at = (steps // self.every + 2 + self.apart) * self.every
            for link in self.links.values():
                link.post({"kind": _KIND, "step": at, "why": departure.asked})
            self._heard(self.worker, at, departure.asked)
        for peer, link in self.links.items():
            said = _taken(link)
            if said is not None:
                self._heard(peer, int(said.get("step", 0)), str(said.get("why")))

    def now(self, steps: int) -> bool:
        """After a step: whether it was the last one."""
        return self._at is not None and steps >= self._at

    def leave(self) -> None:
        """All have met: the next step is not begun."""
        departure.settle(self._why)

    def _heard(self, who: str, at: int, why: str) -> None:
        self._at = at if self._at is None else min(at, self._at)
        self._why[who] = why


def _taken(link: Link) -> Mapping[str, Any] | None:
    """What a peer has said of it by now."""
    try:
        return link.take(_KIND, 0.0)
    except DeadlineError:
        return None
