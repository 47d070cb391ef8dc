"""The carrier interface: it carries whole frames between two workers and may break; a link works above it.

A carrier knows nothing of what it carries. It makes its connection again whenever it breaks; what was in flight
then is lost, and the link above sends it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from whale_nebula.errors import NebulaError
from whale_nebula.wire.tensor import Bytes


@dataclass(frozen=True, slots=True)
class CarrierState:
    """How a carrier stands, `since` when (time.monotonic), how many connections there were, and the last trouble.

    `refusal` is why the last attempt was refused, where that may heal: an expired certificate, which may be renewed.
    """

    connected: bool = False
    since: float = 0.0
    connections: int = 0
    trouble: str = ""
    refusal: NebulaError | None = None


class Receiver(Protocol):
    """A link, as its carrier calls it: from the carrier's threads, for one connection in order."""

    def up(self, connection: int) -> None:
        """There is a fresh connection, the `connection`-th: greet over it."""

    def message(self, data: bytes) -> None:
        """One whole frame has come."""

    def down(self, why: str) -> None:
        """The connection is gone; the carrier is about to make another."""

    def lost(self, error: NebulaError) -> None:
        """There will be no other: the worker is dead, or it refuses this one for a reason that time does not mend."""


class Carrier(Protocol):
    """One worker's way to one other worker."""

    there: str
    where: str  # the address as it is shown: of the other worker, or of what leads to it

    def start(self, receiver: Receiver) -> None:
        """Begin to connect; threads start here and not before."""

    def send(self, connection: int, header: bytes, chunk: Bytes) -> bool:
        """Hand one frame over, once this connection takes it; False if it is gone, though there be another."""

    def opened(self) -> None:
        """The greeting over the present connection is done: a carrier of several lanes may now use them all."""

    def drop(self, why: str) -> None:
        """Break the present connection; another will be made."""

    def pace(self, rate: float) -> None:
        """The link has seen the line carry so many bytes per second: deadlines follow from it."""

    def close(self) -> None:
        """Let what was sent leave, and end for good."""

    def state(self) -> CarrierState:
        """The state of the connection."""
