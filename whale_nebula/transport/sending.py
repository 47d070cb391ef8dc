"""What goes over a link next: greetings first, then what must be sent again, then what is new."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.transport.outbox import Outbox, Parcel
from whale_nebula.wire.conversation import Conversation
from whale_nebula.wire.frame import HEADER_BYTES, Header, chunks
from whale_nebula.wire.replay import Packet
from whale_nebula.wire.tensor import Bytes


class Shipment(NamedTuple):
    """One frame for the carrier, and the parcel that it is a part of, if it is; `last` ends that parcel.

    `share` is what its leaving gives back to the outbox's budget.
    """

    packet: Packet
    parcel: Parcel | None = None
    last: bool = False
    share: int = 0


@dataclass(slots=True)
class Upkeep:
    """What a link spends on itself: greetings, acknowledgements and beats, and what went over the line again.

    None of it is in `LinkTotals`, which counts every tensor and message once.
    """

    frames: int = 0
    bytes: int = 0
    resent_frames: int = 0
    resent_bytes: int = 0


class Sending:
    """Gives the frames of one link in their order. Its owner holds a lock, and asks again when something has changed.

    `beat` is after how many seconds without a frame this side says that it is there.
    """

    def __init__(self, conversation: Conversation, outbox: Outbox, *, beat: float, now: Callable[[], float]) -> None:
        self.upkeep = Upkeep()
        self.connection: int | None = None
        self.last_sent = now()
        self.full = False  # too much is not acknowledged: new frames wait
        self._conversation = conversation
        self._outbox = outbox
        self._beat = beat
        self._now = now
        self._first: deque[Packet] = deque()
        self._again: deque[Packet] = deque()
        self._parcel: Parcel | None = None
        self._chunks: Iterator[tuple[Header, Bytes]] = iter(())

    def connected(self, connection: int, packets: Iterable[Packet]) -> None:
        """There is a connection, on which these go first."""
        self.connection = connection
        self._first = deque(packets)
        self._again.clear()

    def disconnected(self) -> None:
        """There is none; what was to be sent first, or again, is asked for anew on the next."""
        self.connection = None
        self._first.clear()
        self._again.clear()

    def broken(self, connection: int) -> None:
        """That connection takes nothing more, as is about to be told: until then nothing is given out for it."""
        if self.connection == connection:
            self.connection = None

    def answer(self, packets: Iterable[Packet]) -> None:
        """The greeting goes on with these."""
        self._first.extend(packets)

    def again(self, packets: Iterable[Packet]) -> None:
        """These must be sent again before anything new."""
        self._again.extend(packets)

    def forget(self) -> None:
        """Drop what is new and not urgent, the rest of a tensor too."""
        self._parcel = None
        self._outbox.forget()

    @property
    def drained(self) -> bool:
        """Whether everything has been handed to the carrier at least once, and no more is taken."""
        return self._parcel is None and not self._again and self._outbox.drained

    @property
    def told_urgent(self) -> bool:
        """Whether nothing urgent waits."""
        return not self._outbox.urgent

    @property
    def quiet(self) -> float:
        """When to say that this side is there, if nothing else is sent until then."""
        return self.last_sent + self._beat

    def next(self) -> Shipment | None:
        """The next frame, or None: nothing can be sent now."""
        shipment = self._next()
        if shipment is not None:
            self.last_sent = self._now()
        return shipment

    def _next(self) -> Shipment | None:
        if self.connection is None:
            return None
        if self._first:
            return self._kept_up(self._first.popleft())
        if not self._conversation.ready:
            return None
        if self._again:
            return self._sent_again(self._again.popleft())
        return self._urgent() or self._due() or self._new() or self._sign_of_life()

    def _urgent(self) -> Shipment | None:
        parcel = self._outbox.get_urgent()
        if parcel is None:
            return None
        ((header, chunk),) = chunks(parcel.header, parcel.payload)
        return self._framed(header, chunk, parcel)

    def _due(self) -> Shipment | None:
        packet = self._conversation.due()
        return None if packet is None else self._kept_up(packet)

    def _new(self) -> Shipment | None:
        self.full = self._conversation.room() <= 0
        if self.full:
            return None
        if self._parcel is None:
            self._parcel = self._outbox.poll()
            if self._parcel is None:
                return None
            self._chunks = chunks(self._parcel.header, self._parcel.payload)
        parcel = self._parcel
        header, chunk = next(self._chunks)
        if header.last:
            self._parcel = None
        return self._framed(header, chunk, parcel)

    def _framed(self, header: Header, chunk: Bytes, parcel: Parcel) -> Shipment:
        packet = self._conversation.frame(header, chunk)
        return Shipment(packet, parcel, last=header.last, share=HEADER_BYTES + chunk.size)

    def _sign_of_life(self) -> Shipment | None:
        if self._now() >= self.quiet:
            return self._kept_up(self._conversation.beat())
        return None

    def _kept_up(self, packet: Packet) -> Shipment:
        self.upkeep.frames += 1
        self.upkeep.bytes += len(packet[0]) + packet[1].size
        return Shipment(packet)

    def _sent_again(self, packet: Packet) -> Shipment:
        self.upkeep.resent_frames += 1
        self.upkeep.resent_bytes += len(packet[0]) + packet[1].size
        return Shipment(packet)
