"""The sending half of a link: its queue, limited in bytes, and the choice of the next frame."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from whale_nebula.errors import DeadlineError
from whale_nebula.wire.buffers import Packet
from whale_nebula.wire.conversation import Conversation
from whale_nebula.wire.frame import HEADER_BYTES, Header, Kind, count_wire_bytes, split_payload
from whale_nebula.wire.tensor import Bytes


class OutgoingItem(NamedTuple):
    """A tensor or message on its way out."""

    header: Header
    payload: Bytes

    @property
    def size(self) -> int:
        """Its bytes on the wire."""
        one_frame = self.header.kind == Kind.CONTROL
        return self.payload.size + HEADER_BYTES if one_frame else count_wire_bytes(self.payload.size)


class OutgoingFrame(NamedTuple):
    """One frame for the carrier, and the parcel that it is a part of, if any; `last` ends that parcel.

    `share` is the part of the budget that it releases once it has left.
    """

    packet: Packet
    parcel: OutgoingItem | None = None
    last: bool = False
    share: int = 0


class Outbox:
    """Send queue of a link, which decides the order of frames. Thread-safe.

    `put` blocks, inside `waiting`, while more than `budget` bytes wait (one parcel is always accepted). The greeting,
    retransmitted frames, urgent parcels and acknowledgements precede queued parcels. One thread takes `next` and
    releases each `share` with `done`; it waits on `changed`. `finish` drains the queue; `stop` ends it immediately and
    wakes blocked senders. `beat` is the time in seconds without a frame after which a heartbeat is sent.
    """

    def __init__(
        self,
        conversation: Conversation,
        budget: int,
        *,
        beat: float,
        now: Callable[[], float] = time.monotonic,
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)  # for the writer
        self.connection: int | None = None
        self.waiting = 0  # bytes
        self.written = 0
        self._room = threading.Condition(lock)  # for senders, which are woken only when there is room
        self._conversation = conversation
        self._budget = budget
        self._beat = beat
        self._now = now
        self._last_sent = now()
        self._waiting_for_room = waiting
        self._first: deque[Packet] = deque()
        self._again: deque[Packet] = deque()
        self._urgent: deque[OutgoingItem] = deque()
        self._parcels: deque[OutgoingItem] = deque()
        self._parcel: OutgoingItem | None = None  # partly sent
        self._chunks: Iterator[tuple[Header, Bytes]] = iter(())
        self._forgets = self._complete = self._finishing = self._stopped = False

    # The queue.

    def put(self, parcel: OutgoingItem, deadline: float, there: str) -> bool:
        """Queue a parcel; False if nothing is written any more."""
        with self.changed:
            if not self._lacks_room(parcel.size):
                return self._queue(parcel)
        limit = time.monotonic() + deadline
        with self._waiting_for_room(), self.changed:
            while self._lacks_room(parcel.size):
                left = limit - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"waited {deadline:g} s to send to worker '{there}'",
                        why=f"{self.waiting} bytes are queued: the network is stalled or too slow",
                        mend="check the network, or increase 'patience' in the config",
                    )
                self._room.wait(min(left, 3600.0))
            return self._queue(parcel)

    def _queue(self, parcel: OutgoingItem) -> bool:
        if self.finishing or self._forgets or self._complete:
            return False
        self._parcels.append(parcel)
        self.waiting += parcel.size
        self.changed.notify_all()
        return True

    def _lacks_room(self, size: int) -> bool:
        return (
            not (self.finishing or self._forgets or self._complete)
            and self.waiting > 0
            and self.waiting + size > self._budget
        )

    def queue_urgent(self, parcel: OutgoingItem) -> bool:
        """Queue a parcel before all others, whatever the budget; False if nothing is written any more."""
        with self.changed:
            if self._stopped:
                return False
            self._urgent.append(parcel)
            self.waiting += parcel.size
            self.changed.notify_all()
            return True

    def queue_last(self, parcel: OutgoingItem) -> bool:
        """Queue a parcel after all others, whatever the budget, and accept no more; False if nothing is written any
        more.
        """
        with self.changed:
            if self.finishing or self._forgets:
                return False
            self._parcels.append(parcel)
            self.waiting += parcel.size
            self._complete = True
            self._notify_all()
            return True

    def forget(self) -> None:
        """Drop queued frames that are not urgent, also the rest of a tensor, now and in future, as the other side no
        longer needs them.
        """
        with self.changed:
            self._forgets = True
            self._parcel = None
            self.waiting -= sum(parcel.size for parcel in self._parcels)
            self._parcels.clear()
            self._notify_all()

    def finish(self, farewell: OutgoingItem | None = None) -> bool:
        """Accept only the farewell, and end once the queue is empty; False if it had ended."""
        with self.changed:
            over = self.finishing
            if farewell is not None and not over:
                self._parcels.append(farewell)
                self.waiting += farewell.size
            self._finishing = True
            self._notify_all()
            return not over

    def stop(self) -> None:
        """Drop everything and end now."""
        with self.changed:
            self._stopped = True
            self._notify_all()

    def done(self, size: int) -> None:
        """Release budget: these bytes have left."""
        with self.changed:
            self.written += size
            self.waiting -= size
            self._room.notify_all()

    def _notify_all(self) -> None:
        self.changed.notify_all()
        self._room.notify_all()

    @property
    def urgent(self) -> bool:
        """Whether something urgent waits."""
        return bool(self._urgent)

    @property
    def finishing(self) -> bool:
        """Whether no more parcels are accepted."""
        return self._stopped or self._finishing

    @property
    def drained(self) -> bool:
        """Whether everything has been passed to the carrier at least once, and no more is accepted."""
        with self.changed:
            ended = self._stopped or (self._finishing and not self._parcels and not self._urgent)
            return self._parcel is None and not self._again and ended

    # The next frame. `changed` is held.

    def connect(self, connection: int, packets: Iterable[Packet]) -> None:
        """A connection is established, on which these frames are sent first."""
        self.connection = connection
        self._first = deque(packets)
        self._again.clear()

    def disconnect(self) -> None:
        """The connection is lost; the frames to send first, or to retransmit, are determined again for the next one."""
        self.connection = None
        self._first.clear()
        self._again.clear()

    def broken(self, connection: int) -> None:
        """The connection accepts no more frames and is about to report its loss; until then nothing is sent."""
        if self.connection == connection:
            self.connection = None

    def answer(self, packets: Iterable[Packet]) -> None:
        """Continue the greeting with these frames."""
        self._first.extend(packets)

    def again(self, packets: Iterable[Packet]) -> None:
        """Queue frames for retransmission before anything new."""
        self._again.extend(packets)

    def find_heartbeat_delay(self) -> float | None:
        """Seconds until the next heartbeat is due; None if nothing can be sent."""
        if self.connection is None or not self._conversation.ready:
            return None
        return max(0.0, self._last_sent + self._beat - self._now()) + 0.001

    def next(self) -> OutgoingFrame | None:
        """The next frame, or None if nothing can be sent now."""
        talk, packet, shipment = self._conversation, None, None
        if self.connection is None or not (self._first or talk.ready):
            return None
        if self._first:
            packet = self._first.popleft()
        elif self._again:
            packet = self._again.popleft()
        elif self._urgent:
            parcel = self._urgent.popleft()
            shipment = self._frame_next(parcel, split_payload(parcel.header, parcel.payload))
        elif (packet := talk.take_acknowledgement()) is None and talk.room > 0 and (self._parcel or self._parcels):
            if self._parcel is None:
                self._parcel = self._parcels.popleft()
                self._chunks = split_payload(self._parcel.header, self._parcel.payload)
            shipment = self._frame_next(self._parcel, self._chunks)
        elif packet is None and self._now() >= self._last_sent + self._beat:
            packet = talk.build_heartbeat()
        if packet is not None:
            shipment = OutgoingFrame(packet)
        if shipment is not None:
            self._last_sent = self._now()
        return shipment

    def _frame_next(self, parcel: OutgoingItem, frames: Iterator[tuple[Header, Bytes]]) -> OutgoingFrame:
        header, chunk = next(frames)
        if header.last and parcel is self._parcel:
            self._parcel, self._chunks = None, iter(())  # neither holds the payload
        packet = self._conversation.build_frame(header, chunk)
        return OutgoingFrame(packet, parcel, last=header.last, share=HEADER_BYTES + chunk.size)
