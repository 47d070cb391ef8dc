"""Graceful shutdown under local SGD: all clusters end together, at an announced synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_nebula.errors import DeadlineError
from whale_nebula.launch.ending import departure
from whale_nebula.transport.protocol import Link
from whale_nebula.wire.message import build_message

_KIND = "LEAVING"


@dataclass
class Asked:
    """Who was asked to leave, by the number of the program whose step they say: one for all steps of a run."""

    worker: str
    links: Mapping[str, Link]
    _at: dict[int, int] = field(default_factory=dict)
    _why: dict[str, str] = field(default_factory=dict)
    _told: bool = False

    def tell(self, program: int, at: int, why: str) -> None:
        """The worker was asked, and leaves with all others after this step of this program. It says so once."""
        if not self._told:
            self._told = True
            for link in self.links.values():
                link.post(build_message(_KIND, program=program, step=at, why=why))
            self._take(self.worker, program, at, why)

    def hear(self) -> None:
        """Take what others have said by now. Raises where one of them is gone."""
        for peer, link in self.links.items():
            with contextlib.suppress(DeadlineError):  # it has said nothing
                said = link.take(_KIND, 0.0)
                self._take(peer, said["program"], said["step"], said["why"])

    def after(self, program: int, steps: int) -> bool:
        """Whether so many steps of this program were the last."""
        return program in self._at and steps >= self._at[program]

    def leave(self) -> None:
        """All have met: the next step is not begun."""
        departure.settle(self._why)

    def _take(self, who: str, program: int, at: int, why: str) -> None:
        self._at[program] = min(at, self._at.get(program, at))
        self._why[who] = why


@dataclass
class LeavesTogether:
    """What the steps of one program know of it. `ahead` is how many rounds another cluster may be ahead.

    Nobody passes the end of the next but one meeting (and as many rounds more) without having heard what this worker
    had to say before it: so that is where all leave. Where several are asked, the first of these steps counts.
    """

    asked: Asked
    program: int
    every: int
    ahead: int = 0

    def look(self, steps: int) -> None:
        """Before a step, after so many: say that this worker was asked to, and hear who else was. Raises where a peer
        is gone, and where all have agreed to leave.
        """
        departure.begin()
        if departure.asked is not None:
            self.asked.tell(self.program, (steps // self.every + 2 + self.ahead) * self.every, departure.asked)
        self.asked.hear()

    def now(self, steps: int) -> bool:
        """After a step: whether it was the last one."""
        return self.asked.after(self.program, steps)
