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
    """One frame for the carrier, and the item that it is a part of, if any; `last` ends that item.

    `share` is the part of the budget that it releases once it has left.
    """

    packet: Packet
    item: OutgoingItem | None = None
    last: bool = False
    share: int = 0


class Outbox:
    """Send queue of a link, which decides the order of frames. Thread-safe.

    `put` blocks, inside `enter_wait`, while more than `budget` bytes wait (one item is always accepted). The greeting,
    retransmitted frames, urgent items and acknowledgements precede queued items. One thread calls `take_next` and
    releases each `share` with `release_budget`; it waits on `changed`. `finish` drains the queue; `stop` ends it
    immediately and wakes blocked senders. `heartbeat_interval` is the time in seconds without a frame after which a
    heartbeat is sent.
    """

    def __init__(
        self,
        conversation: Conversation,
        budget: int,
        *,
        heartbeat_interval: float,
        now: Callable[[], float] = time.monotonic,
        enter_wait: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)  # for the writer
        self.connection: int | None = None
        self.queued_bytes = 0
        self.written_bytes = 0
        self._room = threading.Condition(lock)  # for senders, which are woken only when there is room
        self._conversation = conversation
        self._budget = budget
        self._heartbeat_interval = heartbeat_interval
        self._now = now
        self._last_sent = now()
        self._enter_wait = enter_wait
        self._first: deque[Packet] = deque()
        self._resent: deque[Packet] = deque()
        self._urgent: deque[OutgoingItem] = deque()
        self._items: deque[OutgoingItem] = deque()
        self._item: OutgoingItem | None = None  # partly sent
        self._chunks: Iterator[tuple[Header, Bytes]] = iter(())
        self._dropping = self._is_complete = self._finishing = self._stopped = False

    # The queue.

    def put(self, item: OutgoingItem, deadline: float, there: str) -> bool:
        """Queue an item, waiting for room at most `deadline` seconds; False if nothing is written any more."""
        with self.changed:
            if not self._lacks_room(item.size):
                return self._queue(item)
        limit = time.monotonic() + deadline
        with self._enter_wait(), self.changed:
            while self._lacks_room(item.size):
                remaining = limit - time.monotonic()
                if remaining <= 0:
                    raise DeadlineError(
                        f"waited {deadline:g} s to send to worker '{there}'",
                        why=f"{self.queued_bytes} bytes are queued: the network is stalled or too slow",
                        mend="check the network, or increase 'patience' in the config",
                    )
                self._room.wait(min(remaining, 3600.0))
            return self._queue(item)

    def _queue(self, item: OutgoingItem) -> bool:
        if self.is_finishing or self._dropping or self._is_complete:
            return False
        self._items.append(item)
        self.queued_bytes += item.size
        self.changed.notify_all()
        return True

    def _lacks_room(self, size: int) -> bool:
        return (
            not (self.is_finishing or self._dropping or self._is_complete)
            and self.queued_bytes > 0
            and self.queued_bytes + size > self._budget
        )

    def queue_urgent(self, item: OutgoingItem) -> bool:
        """Queue an item before all others, whatever the budget; False if nothing is written any more."""
        with self.changed:
            if self._stopped:
                return False
            self._urgent.append(item)
            self.queued_bytes += item.size
            self.changed.notify_all()
            return True

    def queue_last(self, item: OutgoingItem) -> bool:
        """Queue an item after all others, whatever the budget, and accept no more; False if nothing is written any
        more.
        """
        with self.changed:
            if self.is_finishing or self._dropping:
                return False
            self._items.append(item)
            self.queued_bytes += item.size
            self._is_complete = True
            self._notify_all()
            return True

    def drop_queued(self) -> None:
        """Drop queued frames that are not urgent, also the rest of a tensor, now and in future, as the other side no
        longer needs them.
        """
        with self.changed:
            self._dropping = True
            self._item = None
            self.queued_bytes -= sum(HEADER_BYTES + chunk.size for _, chunk in self._chunks)
            self.queued_bytes -= sum(item.size for item in self._items)
            self._items.clear()
            self._notify_all()

    def finish(self, farewell: OutgoingItem | None = None) -> bool:
        """Accept only the farewell, and end once the queue is empty; False if it was already finishing."""
        with self.changed:
            was_finishing = self.is_finishing
            if farewell is not None and not was_finishing:
                self._items.append(farewell)
                self.queued_bytes += farewell.size
            self._finishing = True
            self._notify_all()
            return not was_finishing

    def stop(self) -> None:
        """End now, whatever is queued, and wake blocked senders."""
        with self.changed:
            self._stopped = True
            self._notify_all()

    def release_budget(self, size: int) -> None:
        """Release the budget of bytes that the carrier has accepted."""
        with self.changed:
            self.written_bytes += size
            self.queued_bytes -= size
            self._room.notify_all()

    def _notify_all(self) -> None:
        self.changed.notify_all()
        self._room.notify_all()

    @property
    def has_urgent(self) -> bool:
        """Whether something urgent waits."""
        return bool(self._urgent)

    @property
    def is_finishing(self) -> bool:
        """Whether no more items are accepted."""
        return self._stopped or self._finishing

    @property
    def is_drained(self) -> bool:
        """Whether everything has been passed to the carrier at least once, and no more is accepted."""
        with self.changed:
            ended = self._stopped or (self._finishing and not self._items and not self._urgent)
            return self._item is None and not self._resent and ended

    # The next frame. `changed` is held.

    def connect(self, connection: int, packets: Iterable[Packet]) -> None:
        """A connection is established, on which these frames are sent first."""
        self.connection = connection
        self._first = deque(packets)
        self._resent.clear()

    def disconnect(self) -> None:
        """The connection is lost; the frames to send first, or to retransmit, are determined again for the next one."""
        self.connection = None
        self._first.clear()
        self._resent.clear()

    def mark_broken(self, connection: int) -> None:
        """The connection accepts no more frames and is about to report its loss; until then nothing is sent."""
        if self.connection == connection:
            self.connection = None

    def answer(self, packets: Iterable[Packet]) -> None:
        """Continue the greeting with these frames."""
        self._first.extend(packets)

    def queue_resent(self, packets: Iterable[Packet]) -> None:
        """Queue frames for retransmission before anything new."""
        self._resent.extend(packets)

    def find_heartbeat_delay(self) -> float | None:
        """Seconds until the next heartbeat is due; None if nothing can be sent."""
        if self.connection is None or not self._conversation.ready:
            return None
        return max(0.0, self._last_sent + self._heartbeat_interval - self._now()) + 0.001

    def take_next(self) -> OutgoingFrame | None:
        """The next frame, or None if nothing can be sent now."""
        conversation, packet, outgoing = self._conversation, None, None
        if self.connection is None or not (self._first or conversation.ready):
            return None
        if self._first:
            packet = self._first.popleft()
        elif self._resent:
            packet = self._resent.popleft()
        elif self._urgent:
            item = self._urgent.popleft()
            outgoing = self._frame_next(item, split_payload(item.header, item.payload))
        elif (
            (packet := conversation.take_acknowledgement()) is None
            and conversation.room > 0
            and (self._item or self._items)
        ):
            if self._item is None:
                self._item = self._items.popleft()
                self._chunks = split_payload(self._item.header, self._item.payload)
            outgoing = self._frame_next(self._item, self._chunks)
        elif packet is None and self._now() >= self._last_sent + self._heartbeat_interval:
            packet = conversation.build_heartbeat()
        if packet is not None:
            outgoing = OutgoingFrame(packet)
        if outgoing is not None:
            self._last_sent = self._now()
        return outgoing

    def _frame_next(self, item: OutgoingItem, frames: Iterator[tuple[Header, Bytes]]) -> OutgoingFrame:
        header, chunk = next(frames)
        if header.last and item is self._item:
            self._item, self._chunks = None, iter(())  # neither holds the payload
        packet = self._conversation.build_frame(header, chunk)
        return OutgoingFrame(packet, item, last=header.last, share=HEADER_BYTES + chunk.size)
