"""One connection of a carrier: one stream, or several over which large frames are spread. It breaks as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import Peer
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import is_bare

END = b""
"""The last message of a stream that ends in order. That a stream merely ends says nothing: gRPC may tell a server of a
killed client by the end of its messages first, and only then that the call is cancelled.
"""


_BARE, _BARE_A_SECOND = 400, 200.0  # 2 GB/s are acknowledged so


class Room(threading.Condition):
    """The condition on which senders wait until a lane of their connection has room.

    Each lane waits for frames of its own, under the same lock: one that is handed over wakes one thread and not all.
    `bare` is how often frames may come over the connection that have no content, which nothing else bounds.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)
        self.bare = TokenBucket(_BARE, _BARE_A_SECOND)


class Lane:
    """One stream of frames each way, for any number of threads. Lanes of one connection share their room.

    `on_end` is told once why the stream is over.
    """

    def __init__(self, room: Room | None = None) -> None:
        self.join(room or Room())
        self.over = False  # nothing goes over it any more
        self.why = ""
        self.trouble = ""  # what the side that was dialled knows of the way beyond it
        self.guest: Peer | None = None  # the certificate that the other side has proven to hold
        self.proof: tuple[tuple[str, bytes], ...] = ()  # that of the side that was dialled, sent with its answer
        self.in_order = False  # the other side has ended it, and all that it sent was heard
        self.finished = False  # this side has ended it, and all that it sent has left
        self.on_end: Callable[[str], None] = lambda why: None
        self.begin: Callable[[], object] = lambda: None  # waits until frames may be read
        self._breaks: Callable[[str], None] = lambda why: None  # nothing, until a stream is attached
        self._frame: bytes | None = None
        self._finishing = False
        self._broken = False

    def join(self, room: Room) -> None:
        """Share the send budget of a connection from now on; nobody may be waiting at this lane."""
        self.room, self._filled = room, threading.Condition(room.lock)

    def attach(self, breaks: Callable[[str], None]) -> None:
        """Set the function that aborts the stream."""
        with self.room:
            self._breaks = breaks
            over = self.over
        if over:
            breaks(self.why)

    def send(self, frame: bytes) -> bool:
        """Queue one frame, waiting for room; False if the stream has ended."""
        with self.room:
            self.room.wait_for(lambda: self.free or self.over or self._finishing)
            return self.put(frame)

    @property
    def free(self) -> bool:
        """Whether there is room for a frame. The caller holds the lock."""
        return self._frame is None and not self.over and not self._finishing

    def put(self, frame: bytes) -> bool:
        """Queue one frame for which there is room. The caller holds the lock."""
        if self.over or self._finishing:
            return False
        self._frame = frame
        self._filled.notify_all()
        return True

    def outgoing(self) -> Iterator[bytes]:
        """The frames for gRPC, as it takes them. What is to be broken is broken before its frames end: an end in order
        would look to the other side as if all had been said. One that has finished says so however late gRPC asks: its
        connection may be over by then, as lane 0 ends first, and a mere end would look like a break.
        """
        while True:
            with self.room:
                while not (self._broken if self.over else self._frame is not None or self._finishing):
                    self._filled.wait()
                frame, self._frame = None if self.over else self._frame, None
                self.room.notify_all()
            if frame is None:
                break
            yield frame
        if self.finished or not self.over:
            yield END

    def read(self, incoming: Iterable[bytes], hear: Callable[[bytes], None]) -> str:
        """Hear everything that comes, in this thread, until the stream ends; gives why it did."""
        ended = False
        try:
            self.begin()
            for frame in incoming:
                if self.over:
                    break
                if ended := frame == END:
                    continue
                if is_bare(frame):
                    self._pace()
                hear(frame)
        except Exception as error:  # gRPC raises bare ones too; whatever it was, this stream is over
            self.lose(reason(error))
        else:
            self.in_order = ended and not self.over
            self.lose("the stream has ended")
        return self.why

    def _pace(self) -> None:
        """Block the reader, and so the sender, while empty frames arrive too fast."""
        while not (self.room.bare.take() or self.over):
            with self.room:
                self._filled.wait(1.0 / _BARE_A_SECOND)

    def finish(self) -> None:
        """Take no more; once the last frame has left, this side of the stream ends in order."""
        with self.room:
            self._finishing = True
            self._wake_all()

    def lose(self, why: str) -> None:
        """The stream has ended. It is an error unless this side had sent everything."""
        with self.room:
            said_all = self._finishing and self._frame is None
            if said_all and not self.over:
                self.finished, self._breaks = True, lambda why: None
        self.end(why)

    def end(self, why: str) -> None:
        """Break it now, for this reason; the first reason stays."""
        with self.room:
            if self.over:
                return
            self.over, self.why = True, why
            self._frame = None
            breaks = self._breaks
        try:
            breaks(why)
        finally:
            with self.room:
                self._broken = True
                self._wake_all()
        self.on_end(why)

    def _wake_all(self) -> None:
        self._filled.notify_all()
        self.room.notify_all()


def reason(error: BaseException) -> str:
    """Why something went wrong, in one line. gRPC's errors hold it in `details`, which the other side may say."""
    details = getattr(error, "details", None)
    text = details() if callable(details) else None
    lines = str(text or error or type(error).__name__).strip().splitlines()
    return escape_foreign_text(lines[0]) if lines else type(error).__name__


_SMALL_BYTES = 64 << 10


class Connection:
    """Several lanes (gRPC streams) under one connection number. Lane 0 carries the greeting and small messages in
    order; any lane carries the rest.

    The lanes above 0 are read only once the greeting is done (`opened`): a frame must not overtake it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.room = Room()
        self.adopted = threading.Event()
        self.opened = threading.Event()
        self.met = False  # whether the greeting was ever done
        self.closing = False
        self._lanes: dict[int, Lane] = {}
        self._over = threading.Event()
        self._why = ""
        self._told: list[Callable[[str], None]] = []

    @property
    def over(self) -> bool:
        """Whether the connection has ended."""
        return self._over.is_set()

    def add(self, number: int, lane: Lane) -> bool:
        """Take a lane in; it shares this connection's room from now on, and ends in order at once where this side
        closes. False if it comes too late, or twice.
        """
        with self.room:
            late = self.over or number in self._lanes
            if not late:
                if lane.room is not self.room:
                    lane.join(self.room)
                lane.on_end = partial(self._lane_ended, number, lane)
                self._lanes[number] = lane
                if self.closing:
                    lane.finish()
        if late:
            lane.end(self._why or f"lane {number} came twice")
        elif lane.over:  # before anybody was told
            self._lane_ended(number, lane, lane.why)
        return not late

    def on_end(self, tell: Callable[[str], None]) -> None:
        """Register a callback for the end of the connection; it is called at once if that has come."""
        with self.room:
            over = self.over
            if not over:
                self._told.append(tell)
        if over:
            tell(self._why)

    def hold(self, number: int, lane: Lane) -> None:
        """Let a lane be read only once the link knows of the connection, one above 0 only once the greeting is done."""
        lane.begin = (self.opened if number else self.adopted).wait

    def send(self, frame: bytes) -> bool:
        """Hand over one frame, once a lane has room for it; False if the connection is gone."""
        with self.room:
            while not (self.over or self.closing):
                for lane in list(self._lanes.values())[: 1 if len(frame) < _SMALL_BYTES else None]:
                    if lane.free:
                        return lane.put(frame)
                self.room.wait()
            return False

    def finish(self) -> None:
        """Flush queued frames, and close this side in order."""
        with self.room:
            self.closing = True
            lanes = list(self._lanes.values())
            self.room.notify_all()
        for lane in lanes:
            lane.finish()

    def end(self, why: str) -> None:
        """Break it, all lanes, for this reason; the first reason stays."""
        self._end(why, Lane.end)

    def _end(self, why: str, end_lane: Callable[[Lane, str], None]) -> None:
        with self.room:
            if self.over:
                return
            self._why = why
            self._over.set()
            lanes, told, self._told = list(self._lanes.values()), self._told, []
            self.room.notify_all()
        self.adopted.set()
        self.opened.set()
        for lane in lanes:
            end_lane(lane, why)
        for tell in told:
            tell(why)

    def _lane_ended(self, number: int, lane: Lane, why: str) -> None:
        """A further lane that ends in order is merely gone: the last words are said on lane 0. Once they are, the
        others may end by themselves: to break them would look to the other side as if words were lost. So is one that
        breaks while this side closes, as one does that was still being opened: the last words may be on their way.
        """
        if not (lane.in_order or lane.finished or (number and self.closing)):
            self.end(why)
        elif number == 0:
            self._end(why, Lane.lose)
        else:
            with self.room:
                self._lanes.pop(number, None)

    def wait_over(self, seconds: float) -> bool:
        """Wait so long for its end; whether that has come."""
        return self._over.wait(seconds)
