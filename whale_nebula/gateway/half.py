"""One half of a pair's way through a gateway: the connection of its own worker, or the one to the other gateway.

A half is joined to another one once in its life. When either breaks, so does the other: both workers then connect
and greet anew, and what was in flight is sent again by them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

from whale_nebula.security import Peer
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.wire.frame import Header

_GREETING = 2  # frames: HELLO and AUTH


class Side(Enum):
    """Which half of a pair: that of the worker of this cluster, or the far one."""

    NEAR = "near"
    FAR = "far"

    @property
    def other(self) -> Side:
        """The opposite half."""
        return Side.FAR if self is Side.NEAR else Side.NEAR


class Half:
    """A connection and what came over it. `who` holds it, as the certificates of its lanes say, where there are any.

    `check` raises on a frame that must not be handed on; `pace` waits until as much may be sent over this half;
    `dialled` says that this gateway has opened it.
    """

    def __init__(
        self,
        side: Side,
        who: str,
        connection: Connection,
        check: Callable[[bytes], Header],
        *,
        pace: Callable[[int], None] | None = None,
        dialled: bool = False,
    ) -> None:
        self.side, self.who, self.connection, self.dialled = side, who, connection, dialled
        self.fault = ""
        self.frames = self.bytes = 0  # that came over it and were handed on
        self.partner: Half | None = None
        self._check, self._pace = check, pace
        self._changed = threading.Condition()
        self._heard = time.monotonic()
        self._handing = 0  # frames that wait for the partner to take them
        self._lanes: list[Lane] = []
        self._greeted = threading.Event()  # set at the end, too
        connection.on_end(self._wake)

    @property
    def fresh(self) -> bool:
        """Whether it can still be joined."""
        return self.partner is None and not self.connection.over

    @property
    def guests(self) -> list[Peer]:
        """The certificates that were proven over its lanes."""
        return [lane.guest for lane in list(self._lanes) if lane.guest is not None and not lane.over]

    @property
    def in_order(self) -> bool:
        """Whether the other side has ended it in order, all that it sent being read."""
        return any(lane.in_order for lane in self._lanes)

    @property
    def parted(self) -> bool:
        """Whether its end was in order, whichever side has begun it: nobody has to be looked for."""
        return any(lane.in_order or lane.finished for lane in self._lanes)

    def lane(self, number: int, lane: Lane) -> Callable[[bytes], None]:
        """Take in a lane of the connection; gives what hears its frames."""
        self._lanes.append(lane)
        self.connection.add(number, lane)
        return self._hear_later if number else self.hear

    def join(self, other: Half) -> None:
        """Hand on from now on what comes over either of the two."""
        for half, partner in ((self, other), (other, self)):
            with half._changed:
                half.partner = partner
                half._changed.notify_all()

    def _wake(self, why: str) -> None:
        """The connection is over: let go who waits for a partner."""
        self._greeted.set()
        with self._changed:
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait so long, less if it is joined or over; whether it is still to be joined."""
        with self._changed:
            self._changed.wait_for(lambda: not self.fresh, seconds)
            return self.fresh

    def quiet(self, now: float) -> float:
        """For how long nothing has come over it. One that waits for its partner is not asked for more."""
        with self._changed:
            return 0.0 if self._handing else now - self._heard

    def hear(self, frame: bytes) -> None:
        """One frame, in the thread that reads it: it waits until the partner takes the frame, and so does who sends."""
        try:
            header = self._check(frame)
        except Exception as error:
            self.fault = str(error).partition("\n")[0]
            raise
        with self._changed:
            self._handing += 1
        partner = self.partner or self._wait_for_partner()
        sent = partner is not None and partner.send(frame)
        self._done(len(frame) if sent else None, greeting=header.epoch == 0)

    def _hear_later(self, frame: bytes) -> None:
        self._greeted.wait()
        self.hear(frame)

    def send(self, frame: bytes) -> bool:
        """Send a frame over it, when it is its turn."""
        if self._pace is not None:
            self._pace(len(frame))
        return self.connection.send(frame)

    def _done(self, size: int | None, *, greeting: bool) -> None:
        """A frame of this size was handed on. Numbered frames of all lanes may follow once both frames of the greeting,
        which come by the first, are on their way: at each gateway as at the worker, so that none overtakes them.
        """
        with self._changed:
            self._handing -= 1
            self._heard = time.monotonic()
            if size is None:
                return
            self.frames += 1
            self.bytes += size
            count = self.frames
        if not greeting or count >= _GREETING:
            self._greeted.set()

    def _wait_for_partner(self) -> Half | None:
        with self._changed:
            self._changed.wait_for(lambda: self.partner is not None or self.connection.over)
            return self.partner
