"""One half of a pair's connection through a gateway: to the gateway's own worker, or to the other gateway.

A half is joined to another one only once. When either breaks, so does the other: both workers then connect and greet
again, and retransmit the frames that were in flight.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial

from whale_nebula.errors import RemoteProtocolError, TransportError
from whale_nebula.security import Peer
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import FRAME_CAP, HEADER_BYTES, Header, unpack_header

_GREETING_FRAMES = 2  # HELLO and AUTH


class Side(Enum):
    """Which half of a pair: the near one, of the worker of this cluster, or the far one."""

    NEAR = "near"
    FAR = "far"

    @property
    def other(self) -> Side:
        """The opposite half."""
        return Side.FAR if self is Side.NEAR else Side.NEAR


class Half:
    """One connection of a pair, with its traffic. `identity_uri` is the identity by the certificates of its lanes, if
    any.

    `check` raises for a frame that must not be forwarded; `pace` waits until that many bytes may be sent over this
    half; `meter` is called with the number of bytes that were forwarded from it or sent over it; `dialled` means that
    this gateway has opened it.
    """

    def __init__(
        self,
        side: Side,
        identity_uri: str,
        connection: Connection,
        check: Callable[[bytes], Header],
        *,
        pace: Callable[[int], None] | None = None,
        meter: Callable[[int], None] = lambda size: None,
        dialled: bool = False,
    ) -> None:
        self._meter = meter
        self.side, self.identity_uri, self.connection, self.dialled = side, identity_uri, connection, dialled
        self.fault = ""
        self.frames = self.bytes = 0  # received over it and forwarded
        self.partner: Half | None = None
        self._check, self._pace = check, pace
        self._changed = threading.Condition()
        self._last_frame_at = time.monotonic()
        self._frames_in_transfer = 0  # frames that wait until the partner accepts them
        self._lanes: dict[int, Lane] = {}  # by number: one that has ended makes room for the next
        self._greeted = threading.Event()  # set at the end, too
        connection.on_end(self._handle_end)

    @property
    def is_joinable(self) -> bool:
        """Whether it can still be joined."""
        return self.partner is None and not self.connection.is_over

    @property
    def certified_peers(self) -> list[Peer]:
        """The authenticated certificates of its lanes."""
        return [
            lane.certified_peer
            for lane in list(self._lanes.values())
            if lane.certified_peer is not None and not lane.is_over
        ]

    @property
    def ended_gracefully(self) -> bool:
        """Whether the other side has ended it gracefully, and all its frames were read."""
        return any(lane.ended_gracefully for lane in list(self._lanes.values()))

    @property
    def was_closed_gracefully(self) -> bool:
        """Whether either side has ended it gracefully."""
        return any(lane.ended_gracefully or lane.finished for lane in list(self._lanes.values()))

    def add_lane(self, number: int, lane: Lane) -> Callable[[bytes], None]:
        """Add a lane of the connection; returns the handler of its frames. Raises if the lane exists."""
        if number:
            # So that nothing is buffered for a greeting that may never arrive.
            lane.wait_to_read = self._greeted.wait
        elif self.side is Side.FAR and not self.dialled:
            # So that nothing is buffered for a worker that may never connect.
            lane.wait_to_read = self._block_until_joined
        if not self.connection.add(number, lane):
            raise TransportError(lane.reason)
        self._lanes[number] = lane
        return self.receive

    def join(self, other: Half) -> None:
        """Forward frames between the two halves from now on."""
        for half, partner in ((self, other), (other, self)):
            with half._changed:
                half.partner = partner
                half._changed.notify_all()

    def _handle_end(self, why: str) -> None:
        """The connection has ended: wake threads that wait for a partner."""
        self._greeted.set()
        with self._changed:
            self._changed.notify_all()

    def wait_joined(self, seconds: float) -> bool:
        """Wait this long, or until it is joined or over; returns whether it can still be joined."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_joinable, seconds)
            return self.is_joinable

    def _block_until_joined(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_joinable)

    def measure_silence(self, now: float) -> float:
        """Seconds since its last frame; 0 while a frame waits until the partner accepts it."""
        with self._changed:
            return 0.0 if self._frames_in_transfer else now - self._last_frame_at

    def receive(self, frame: bytes) -> None:
        """Receive one frame, in the reading thread: blocks until the partner accepts it, which throttles the sender."""
        try:
            header = self._check(frame)
        except Exception as error:
            self.fault = str(error).partition("\n")[0]
            raise
        with self._changed:
            self._frames_in_transfer += 1
            self._block_until_joined()
            partner = self.partner
        sent = partner is not None and partner.send(frame)
        self._count_forwarded(len(frame) if sent else None, greeting=header.conversation == 0)

    def send(self, frame: bytes) -> bool:
        """Send a frame over it, after its turn on the WAN link."""
        if self._pace is not None:
            self._pace(len(frame))
        sent = self.connection.send(frame)
        if sent:
            self._meter(len(frame))
        return sent

    def _count_forwarded(self, size: int | None, *, greeting: bool) -> None:
        """Count a frame of this size that was forwarded, or none (None). Numbered frames of all lanes may follow once
        both frames of the greeting, which use lane 0, are forwarded: at each gateway as at the worker, so that none
        overtakes them.
        """
        with self._changed:
            self._frames_in_transfer -= 1
            self._last_frame_at = time.monotonic()
            if size is None:
                return
            self.frames += 1
            self.bytes += size
            count = self.frames
        self._meter(size)
        if not greeting or count >= _GREETING_FRAMES:
            self._greeted.set()


class Inspection:
    """The rules for the frames of one pair of workers, in both directions.

    `numbers` are those of the two workers on the wire. If they are unknown, they are taken from the first frame, which
    all others must match.
    """

    def __init__(self, numbers: tuple[int, int] | None = None) -> None:
        self.numbers = numbers
        self._lock = threading.Lock()

    @classmethod
    def for_pair(cls, roster: Sequence[str] | None, here: str, there: str) -> Inspection:
        """The rules for a worker of this cluster and one of another; `roster` is None if some workers are unknown."""
        return cls(None if roster is None else (roster.index(here), roster.index(there)))

    def check(self, frame: bytes, *, outward: bool) -> Header:
        """Check a frame that leaves or enters this cluster; returns its header, or raises if it breaks a rule."""
        if not HEADER_BYTES <= len(frame) <= FRAME_CAP:
            raise RemoteProtocolError(f"a message of {len(frame)} bytes is not a frame")
        header, _ = unpack_header(frame[:HEADER_BYTES], sealed=True)
        if len(frame) != HEADER_BYTES + header.length:
            raise RemoteProtocolError(f"received {len(frame) - HEADER_BYTES} bytes in a frame of {header.length}")
        ends = (header.source, header.destination)
        pair = ends if outward else ends[::-1]
        if self.numbers is None:
            if ends[0] == ends[1]:
                raise RemoteProtocolError(f"a frame from worker {ends[0]} to itself")
            with self._lock:
                self.numbers = self.numbers or pair
        if pair != self.numbers:
            raise RemoteProtocolError(
                f"a frame from worker {ends[0]} to worker {ends[1]}, which is not the pair of this stream",
                why="a worker may send frames for itself only",
            )
        return header


_LOG = logging.getLogger("whale_nebula.gateway")
_REPEAT_SECONDS = _IDLE_SECONDS = 5.0
_CROSSING_SECONDS = 1.0  # if a stream takes longer to open, the link is slow, or the address is unreachable
_ARRIVALS, _ARRIVALS_A_SECOND = 100, 2.0
REPLACED = "another connection has replaced it"


class Pair:
    """A worker of this cluster (`here`) and one of another (`there`).

    Each gateway may dial the other one for the same pair. Of two crossing attempts one must win: that of the gateway
    whose cluster has the later name. This gateway `yields` if the other one wins. A winning attempt that takes long
    is abandoned if the other gateway dials a second time meanwhile: its address may be unreachable.
    """

    def __init__(
        self,
        here: str,
        there: str,
        inspection: Inspection,
        on_end: Callable[[Pair, Half, str], None],
        *,
        yields: bool,
        grace: float = 5.0,
        memory_seconds: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.here, self.there, self.inspection, self.yields = here, there, inspection, yields
        self.account = ""  # the account of the local worker, if any
        self._arrivals = TokenBucket(_ARRIVALS, _ARRIVALS_A_SECOND)
        self._separated_at = float("-inf")  # when the two halves were separated
        self._on_end, self._grace, self._memory_seconds, self._now = on_end, grace, memory_seconds, now
        self._lock = threading.Lock()
        self._halves: dict[Side, Half] = {}
        self._attempts: dict[Half, float] = {}  # current attempts to dial, with their start times
        self._used_at = now()
        self._refused_at = float("-inf")
        self._retired = False

    def __str__(self) -> str:
        return f"{self.here} - {self.there}"

    def find_half(self, side: Side) -> Half | None:
        """The current half of a side."""
        with self._lock:
            return self._halves.get(side)

    @property
    def is_known(self) -> bool:
        """Whether the two are joined, or were joined so recently that they are expected to reconnect."""
        with self._lock:
            joined = any(half.partner is not None for half in self._halves.values())
            return joined or self._now() - self._separated_at < self._memory_seconds

    @contextlib.contextmanager
    def begin_attempt(self, half: Half, near: Half) -> Iterator[bool]:
        """Context of an attempt to dial the other gateway, with `half`, for `near`; yields False if unneeded."""
        with self._lock:
            needed = near.is_joinable
            if needed:
                self._attempts[half] = self._now()
        try:
            yield needed
        finally:
            with self._lock:
                self._attempts.pop(half, None)

    def retire(self) -> bool:
        """Retire the pair if it is unused, and was not used recently: it takes no more streams. Returns whether it is
        retired.
        """
        with self._lock:
            is_needed = self._halves or self._attempts or self._now() - self._separated_at < self._memory_seconds
            self._retired = self._retired or not (is_needed or self._now() - self._used_at < _IDLE_SECONDS)
            return self._retired

    def _check_not_retired(self) -> None:
        if self._retired:
            raise TransportError(f"{self} was just removed", why="it is created again at the next attempt")

    def check_rate(self) -> None:
        """Count one more half; raises above the rate limit, as each is written to the audit log."""
        with self._lock:
            self._check_not_retired()
            self._used_at = self._now()
        if not self._arrivals.take():
            raise TransportError(f"too many new streams of {self}", why="each is recorded in the audit log")

    def yield_to_incoming(self) -> None:
        """End our own attempts, as the other gateway has dialled; raises if one of ours wins."""
        with self._lock:
            self._check_crossing()
            needless = [half for half in self._attempts if half is not self._halves.get(Side.FAR)]
        for half in needless:
            half.connection.end("the other gateway has opened a stream meanwhile")

    def add_half(self, half: Half) -> None:
        """Add a half, which replaces the previous one. Raises if it has crossed our own attempt, and ours wins."""
        with self._lock:
            self._check_not_retired()
            if half.side is Side.FAR:
                self._check_crossing()
            previous = self._set_half(half)
        self._finish_join(half, previous)

    def use_dialled_half(self, half: Half, near: Half) -> bool:
        """Use the half that was dialled for `near`; False if `near` is joined already, or over."""
        with self._lock:
            if self._halves.get(Side.NEAR) is not near or not near.is_joinable:
                return False
            previous = self._set_half(half)
        self._finish_join(half, previous)
        return True

    def _check_crossing(self) -> None:
        """Raise if an attempt of the other gateway crosses ours and loses. If it repeats, our stream is lost there."""
        far, now = self._halves.get(Side.FAR), self._now()
        has_open_half = far is not None and far.dialled and not far.connection.is_over
        has_recent_attempt = any(
            now - began < _CROSSING_SECONDS or self._refused_at < began
            for half, began in self._attempts.items()
            if half is not far
        )
        is_repeated = now - self._refused_at < _REPEAT_SECONDS
        if not self.yields and (has_recent_attempt or (has_open_half and not is_repeated)):
            self._refused_at = now
            raise TransportError("both gateways opened a stream for this pair", why="the other stream is used")

    def _set_half(self, half: Half) -> Half | None:
        other = self._halves.get(half.side.other)
        previous = self._halves.get(half.side)
        self._halves[half.side] = half
        if other is not None and other.is_joinable:
            half.join(other)
        return previous

    def _finish_join(self, half: Half, previous: Half | None) -> None:
        if previous is not None:
            previous.connection.end(REPLACED)
        half.connection.on_end(partial(self._handle_half_end, half))

    def end(self, why: str) -> None:
        """Abort both halves."""
        with self._lock:
            halves = list(self._halves.values())
        for half in halves:
            half.connection.end(why)

    def _handle_half_end(self, half: Half, why: str) -> None:
        """Handle the end of a half. Frames that its worker has sent before a graceful end are still forwarded."""
        with self._lock:
            if self._halves.get(half.side) is half:
                del self._halves[half.side]
            partner = half.partner
            if partner is not None:
                self._separated_at = self._now()
        if partner is not None and half.ended_gracefully and not half.fault:
            partner.connection.finish()
            later = threading.Timer(self._grace, partner.connection.end, (why,))
            later.daemon = True
            later.start()
            partner.connection.on_end(lambda _: later.cancel())
        elif partner is not None:
            partner.connection.end(f"its other half has ended: {why}")
        self._on_end(self, half, why)
