"""The send queue of a link: ordered, limited in bytes, with priority for urgent messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.errors import DeadlineError
from whale_nebula.wire.conversation import Conversation
from whale_nebula.wire.frame import HEADER_BYTES, Header, Kind, chunks, wire_bytes
from whale_nebula.wire.replay import Packet
from whale_nebula.wire.tensor import Bytes


class Parcel(NamedTuple):
    """A tensor or message on its way out."""

    header: Header
    payload: Bytes

    @property
    def size(self) -> int:
        """Its bytes on the wire."""
        one_frame = self.header.kind == Kind.CONTROL
        return self.payload.size + HEADER_BYTES if one_frame else wire_bytes(self.payload.size)


class Outbox:
    """A queue between the threads that send and the one that writes.

    `put` blocks while more than `budget` bytes wait (one parcel is always let in); `finish` lets the writer
    drain what is there and then ends it; `stop` ends it at once and frees who is blocked. A writer that waits for
    more than parcels waits on `changed`, too, and asks with `poll`. `waiting` is around every wait for room.
    """

    def __init__(
        self, budget: int, *, waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)  # for the writer
        self.written = 0
        self._room = threading.Condition(lock)  # for those who send: they are not woken for what is none of theirs
        self._budget = budget
        self._waiting_for_room = waiting
        self._waiting: deque[Parcel] = deque()
        self._urgent: deque[Parcel] = deque()
        self._bytes = 0
        self._forgets = False
        self._finishing = False
        self._stopped = False

    def put(self, parcel: Parcel, deadline: float, there: str) -> bool:
        """Queue a parcel; False if nothing is written any more."""
        with self.changed:
            if not self._lacks_room(parcel.size):
                return self._queue(parcel)
        limit = time.monotonic() + deadline
        with self._waiting_for_room(), self.changed:
            while self._lacks_room(parcel.size):
                left = limit - time.monotonic()
                if left <= 0:
                    raise self._full(deadline, there)
                self._room.wait(min(left, 3600.0))
            return self._queue(parcel)

    def _lacks_room(self, size: int) -> bool:
        return not (self._over or self._forgets) and self._bytes > 0 and self._bytes + size > self._budget

    def _queue(self, parcel: Parcel) -> bool:
        if self._over or self._forgets:
            return False
        self._waiting.append(parcel)
        self._bytes += parcel.size
        self.changed.notify_all()
        return True

    def put_urgent(self, parcel: Parcel) -> bool:
        """Queue a parcel before all others, whatever the budget; False if nothing is written any more."""
        with self.changed:
            if self._stopped:
                return False
            self._urgent.append(parcel)
            self._bytes += parcel.size
            self.changed.notify_all()
            return True

    def get(self) -> Parcel | None:
        """The next parcel for the writer, once there is one; None when there will be no more."""
        with self.changed:
            while not (self._stopped or self._urgent or self._waiting or self._finishing):
                self.changed.wait()
            if self._stopped:
                return None
            if self._urgent:
                return self._urgent.popleft()
            return self._waiting.popleft() if self._waiting else None

    def get_urgent(self) -> Parcel | None:
        """An urgent parcel if there is one: asked between the chunks of a tensor."""
        with self.changed:
            return self._urgent.popleft() if self._urgent else None

    def poll(self) -> Parcel | None:
        """The next parcel if there is one, without waiting."""
        with self.changed:
            if self._urgent:
                return self._urgent.popleft()
            return self._waiting.popleft() if self._waiting else None

    @property
    def waiting(self) -> int:
        """How many bytes wait."""
        return self._bytes

    @property
    def urgent(self) -> bool:
        """Whether something urgent waits."""
        return bool(self._urgent)

    @property
    def drained(self) -> bool:
        """Whether nothing waits and nothing more is taken."""
        with self.changed:
            return self._stopped or (self._finishing and not self._waiting and not self._urgent)

    def forget(self) -> None:
        """Drop what waits and is not urgent, now and from now on: nobody wants it any more."""
        with self.changed:
            self._forgets = True
            self._bytes -= sum(parcel.size for parcel in self._waiting)
            self._waiting.clear()
            self._notify_all()

    @property
    def finishing(self) -> bool:
        """Whether no more is taken."""
        return self._over

    def done(self, size: int) -> None:
        """So many bytes of the budget have left."""
        with self.changed:
            self.written += size
            self._bytes -= size
            self._room.notify_all()

    def finish(self, farewell: Parcel | None = None) -> bool:
        """Take no more than the farewell, and end once all that is queued has left; False if it was over."""
        with self.changed:
            over = self._over
            if farewell is not None and not over:
                self._waiting.append(farewell)
                self._bytes += farewell.size
            self._finishing = True
            self._notify_all()
            return not over

    def stop(self) -> None:
        """Drop everything and end now."""
        with self.changed:
            self._stopped = True
            self._notify_all()

    def _notify_all(self) -> None:
        self.changed.notify_all()
        self._room.notify_all()

    @property
    def _over(self) -> bool:
        return self._stopped or self._finishing

    def _full(self, deadline: float, there: str) -> DeadlineError:
        return DeadlineError(
            f"waited {deadline:g} s to send to worker '{there}'",
            why=f"{self._bytes} bytes wait for the line and none has left it for long, or it is too slow",
            mend="look at the line, or allow more time: 'patience' in the config",
        )


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
        return self._frame_chunk(header, chunk, parcel)

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
        return self._frame_chunk(header, chunk, parcel)

    def _frame_chunk(self, header: Header, chunk: Bytes, parcel: Parcel) -> Shipment:
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
