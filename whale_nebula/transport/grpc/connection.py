"""One connection of a carrier: one stream, or several over which large frames are spread. They break together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import Peer
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import is_bare

END = b""
"""The last message of a stream that ends gracefully. The mere end of a stream is ambiguous: for a killed client, gRPC
may report to a server the end of its messages first, and only then that the call is cancelled.
"""


_BARE, _BARE_A_SECOND = 400, 200.0  # enough to acknowledge 2 GB/s


class Room(threading.Condition):
    """The condition on which senders wait until a lane of their connection has room.

    Each lane has a condition for its own frames, under the same lock: a queued frame wakes one thread, not all.
    `bare` limits the rate of received frames without content, which nothing else bounds.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)
        self.bare = TokenBucket(_BARE, _BARE_A_SECOND)


class Lane:
    """One stream of frames each way, for any number of threads. Lanes of one connection share their room.

    `on_end` is called once, with the reason of the stream's end.
    """

    def __init__(self, room: Room | None = None) -> None:
        self.join(room or Room())
        self.is_over = False  # nothing is sent on it any more
        self.reason = ""
        self.trouble = ""  # the dialled side's report of a problem on the path beyond it
        self.certified_peer: Peer | None = None  # the authenticated certificate of the other side
        self.proof: tuple[tuple[str, bytes], ...] = ()  # the dialled side's proof of identity, sent with its answer
        self.ended_gracefully = False  # the other side has ended it, and all its frames were received
        self.finished = False  # this side has ended it, and all its frames have left
        self.on_end: Callable[[str], None] = lambda reason: None
        self.wait_to_read: Callable[[], object] = lambda: None  # waits until frames may be read
        self._abort: Callable[[str], None] = lambda reason: None  # no effect until a stream is attached
        self._frame: bytes | None = None
        self._finishing = False
        self._is_aborted = False

    def join(self, room: Room) -> None:
        """Share the send budget of a connection from now on; no thread may be waiting at this lane."""
        self.room, self._frame_queued = room, threading.Condition(room.lock)

    def attach_stream(self, abort: Callable[[str], None]) -> None:
        """Set the function that aborts the stream."""
        with self.room:
            self._abort = abort
            is_over = self.is_over
        if is_over:
            abort(self.reason)

    def send(self, frame: bytes) -> bool:
        """Queue one frame, waiting for room; False if the stream has ended."""
        with self.room:
            self.room.wait_for(lambda: self.has_room or self.is_over or self._finishing)
            return self.put(frame)

    @property
    def has_room(self) -> bool:
        """Whether there is room for a frame. The caller holds the lock."""
        return self._frame is None and not self.is_over and not self._finishing

    def put(self, frame: bytes) -> bool:
        """Queue one frame for which there is room. The caller holds the lock."""
        if self.is_over or self._finishing:
            return False
        self._frame = frame
        self._frame_queued.notify_all()
        return True

    def yield_frames(self) -> Iterator[bytes]:
        """Yield the frames for gRPC. A stream that must be aborted is aborted before its frames end: a graceful end
        would mean to the other side that everything was sent. A finished stream yields its last message however late
        gRPC requests it: its connection may be over by then, as lane 0 ends first, and a plain end would look like an
        abort.
        """
        while True:
            with self.room:
                while not (self._is_aborted if self.is_over else self._frame is not None or self._finishing):
                    self._frame_queued.wait()
                frame, self._frame = None if self.is_over else self._frame, None
                self.room.notify_all()
            if frame is None:
                break
            yield frame
        if self.finished or not self.is_over:
            yield END

    def read(self, incoming: Iterable[bytes], receive: Callable[[bytes], None]) -> str:
        """Pass on all received frames, in this thread, until the stream ends; returns the reason of its end."""
        ended = False
        try:
            self.wait_to_read()
            for frame in incoming:
                if self.is_over:
                    break
                if ended := frame == END:
                    continue
                if is_bare(frame):
                    self._pace()
                receive(frame)
        except Exception as error:  # gRPC also raises plain exceptions; after any of them this stream is over
            self.mark_lost(describe_error(error))
        else:
            self.ended_gracefully = ended and not self.is_over
            self.mark_lost("the stream has ended")
        return self.reason

    def _pace(self) -> None:
        """Block the reader, and so the sender, while empty frames arrive too fast."""
        while not (self.room.bare.take() or self.is_over):
            with self.room:
                self._frame_queued.wait(1.0 / _BARE_A_SECOND)

    def finish(self) -> None:
        """Accept no more frames; once the last one has left, this side of the stream ends gracefully."""
        with self.room:
            self._finishing = True
            self._wake_all()

    def mark_lost(self, reason: str) -> None:
        """The stream has ended. It is an error unless this side had sent everything."""
        with self.room:
            sent_everything = self._finishing and self._frame is None
            if sent_everything and not self.is_over:
                self.finished, self._abort = True, lambda reason: None
        self.end(reason)

    def end(self, reason: str) -> None:
        """Abort it now, for this reason; the first reason is kept."""
        with self.room:
            if self.is_over:
                return
            self.is_over, self.reason = True, reason
            self._frame = None
            abort = self._abort
        try:
            abort(reason)
        finally:
            with self.room:
                self._is_aborted = True
                self._wake_all()
        self.on_end(reason)

    def _wake_all(self) -> None:
        self._frame_queued.notify_all()
        self.room.notify_all()


def describe_error(error: BaseException) -> str:
    """The reason of an error, in one line. gRPC's errors have it in `details`, which may be text of the other side."""
    details = getattr(error, "details", None)
    text = details() if callable(details) else None
    lines = str(text or error or type(error).__name__).strip().splitlines()
    return escape_foreign_text(lines[0]) if lines else type(error).__name__


_SMALL_BYTES = 64 << 10


class Connection:
    """Several lanes (gRPC streams) under one connection number. Lane 0 carries the greeting and small messages in
    order; any lane carries the rest.

    The lanes above 0 are read only once the greeting is complete (`opened`): a frame must not overtake it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.room = Room()
        self.adopted = threading.Event()
        self.opened = threading.Event()
        self.was_greeted = False  # whether the greeting was ever completed
        self.closing = False
        self._lanes: dict[int, Lane] = {}
        self._end_event = threading.Event()
        self._end_reason = ""
        self._end_callbacks: list[Callable[[str], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended."""
        return self._end_event.is_set()

    def add(self, number: int, lane: Lane) -> bool:
        """Add a lane; it shares this connection's room from now on, and ends gracefully at once if this side is
        closing. False if it is late or a duplicate.
        """
        with self.room:
            late = self.is_over or number in self._lanes
            if not late:
                if lane.room is not self.room:
                    lane.join(self.room)
                lane.on_end = partial(self._handle_lane_end, number, lane)
                self._lanes[number] = lane
                if self.closing:
                    lane.finish()
        if late:
            lane.end(self._end_reason or f"lane {number} was opened twice")
        elif lane.is_over:  # before `on_end` was set
            self._handle_lane_end(number, lane, lane.reason)
        return not late

    def on_end(self, report: Callable[[str], None]) -> None:
        """Register a callback for the end of the connection; it is called at once if the connection has ended."""
        with self.room:
            is_over = self.is_over
            if not is_over:
                self._end_callbacks.append(report)
        if is_over:
            report(self._end_reason)

    def hold_reading(self, number: int, lane: Lane) -> None:
        """Block reading of a lane until the link is notified of the connection and, above lane 0, until the greeting is
        complete.
        """
        lane.wait_to_read = (self.opened if number else self.adopted).wait

    def send(self, frame: bytes) -> bool:
        """Queue one frame, once a lane has room for it; False if the connection is lost."""
        with self.room:
            while not (self.is_over or self.closing):
                for lane in list(self._lanes.values())[: 1 if len(frame) < _SMALL_BYTES else None]:
                    if lane.has_room:
                        return lane.put(frame)
                self.room.wait()
            return False

    def finish(self) -> None:
        """Flush queued frames, and close this side gracefully."""
        with self.room:
            self.closing = True
            lanes = list(self._lanes.values())
            self.room.notify_all()
        for lane in lanes:
            lane.finish()

    def end(self, reason: str) -> None:
        """Abort all lanes, for this reason; the first reason is kept."""
        self._end(reason, Lane.end)

    def _end(self, reason: str, end_lane: Callable[[Lane, str], None]) -> None:
        with self.room:
            if self.is_over:
                return
            self._end_reason = reason
            self._end_event.set()
            lanes, callbacks, self._end_callbacks = list(self._lanes.values()), self._end_callbacks, []
            self.room.notify_all()
        self.adopted.set()
        self.opened.set()
        for lane in lanes:
            end_lane(lane, reason)
        for callback in callbacks:
            callback(reason)

    def _handle_lane_end(self, number: int, lane: Lane, reason: str) -> None:
        """Handle the end of a lane. A lane above 0 that ends gracefully is only removed: the last messages are sent on
        lane 0. After these the other lanes end by themselves: aborting them would look to the other side like lost
        messages. A lane that aborts while this side closes, such as one that was still being opened, is also only
        removed: the last messages may be in flight.
        """
        if not (lane.ended_gracefully or lane.finished or (number and self.closing)):
            self.end(reason)
        elif number == 0:
            self._end(reason, Lane.mark_lost)
        else:
            with self.room:
                self._lanes.pop(number, None)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait this long for its end; returns whether it has ended."""
        return self._end_event.wait(seconds)
