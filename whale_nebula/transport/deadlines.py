"""Every deadline of a link in one place: what is given, and what follows from it or from what was observed."""

from __future__ import annotations

from dataclasses import dataclass

# What a sender's kernel may hold of one connection: a ping queues behind it.
_BACKLOG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a link waits, in seconds, before it does what.

    `patience`: how long somebody who is not heard, or who has not come yet, is waited for. `silence`: within
    which time it is noticed and said that nothing is heard. `gateway_grace`: how long a gateway may refuse.
    `grace`: how long an orderly end may stand still. `connect`: how long one attempt may take.

    >>> Deadlines(silence=8.0).beat, Deadlines(patience=20.0).stall(waiting=0, rate=None)
    (2.0, 20.0)
    """

    patience: float = 120.0
    silence: float = 8.0
    gateway_grace: float = 30.0
    grace: float = 5.0
    connect: float = 5.0
    look: float = 1.0  # how often certificates, the policy and a peer that went are looked at

    @property
    def beat(self) -> float:
        """After how long without a frame this side says that it is there."""
        return self.silence / 4

    @property
    def keepalive(self) -> float:
        """After how long without a byte a connection is asked whether it still is one."""
        return self.silence * 0.375

    def ping(self, rate: float | None) -> float:
        """How long the answer to that may take: the rest of `silence`, or what a slow line's queue takes.

        `rate` is what the line was seen to carry, in bytes per second.

        >>> Deadlines().ping(None), Deadlines().ping(rate=750_000)
        (3.0, 8.388608)
        """
        usual = self.silence * 0.375
        return max(usual, 1.5 * _BACKLOG_BYTES / rate) if rate else usual

    def stall(self, waiting: int, rate: float | None) -> float:
        """How long a send may wait for room: `patience`, or twice the time that a working line needs for it.

        >>> Deadlines().stall(waiting=64 << 20, rate=100_000)
        1342.17728
        """
        return max(self.patience, 2 * waiting / rate) if rate else self.patience

    def again(self, attempt: int, draw: float) -> float:
        """How long to wait before the `attempt`-th try (from 0) to connect again; `draw` is random in [0, 1).

        >>> [Deadlines().again(attempt, 0.5) for attempt in (0, 1, 2, 9)]
        [0.05, 0.1, 0.2, 2.0]
        """
        return min(2.0, 0.05 * 2.0 ** min(attempt, 16)) * (0.5 + draw)
