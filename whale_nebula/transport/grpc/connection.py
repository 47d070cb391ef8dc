"""One connection of a carrier: a lane, or several over which large frames are spread. It breaks as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from whale_nebula.transport.grpc.lane import Lane, Room

_SMALL_BYTES = 64 << 10


class Connection:
    """Lanes under one number. Lane 0 carries the greeting and what is small, in order; any lane carries the rest.

    The lanes above 0 are read only once the greeting is done (`opened`): a frame must not overtake it.

    >>> connection = Connection("00112233aabbccdd")
    >>> lane = connection.lane(0)
    >>> connection.send(b"frame"), next(lane.outgoing())
    (True, b'frame')
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
        """Whether it is gone."""
        return self._over.is_set()

    def lane(self, number: int) -> Lane:
        """A lane of it, made now; one that comes too late is over at once."""
        lane = Lane(self.room)
        self.add(number, lane)
        return lane

    def add(self, number: int, lane: Lane) -> None:
        """Take a lane in; it shares this connection's room from now on."""
        with self.room.changed:
            late = self.over or number in self._lanes
            if not late:
                if lane.room is not self.room:
                    lane.join(self.room)
                lane.on_end = partial(self._lane_ended, number, lane)
                self._lanes[number] = lane
        if late:
            lane.end(self._why or f"lane {number} came twice")
        elif lane.over:  # before anybody was told
            self._lane_ended(number, lane, lane.why)

    def on_end(self, tell: Callable[[str], None]) -> None:
        """Be told once when it is gone, at once if it is."""
        with self.room.changed:
            over = self.over
            if not over:
                self._told.append(tell)
        if over:
            tell(self._why)

    def hearer(self, number: int, hear: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """What a lane's reader calls. It holds back until the link knows of the connection, and for the lanes above 0
        until the greeting is done.
        """
        ready = self.opened if number else self.adopted

        def hold(frame: bytes) -> None:
            ready.wait()
            hear(frame)

        return hold

    def send(self, frame: bytes) -> bool:
        """Hand over one frame, once a lane has room for it; False if the connection is gone."""
        with self.room.changed:
            while not (self.over or self.closing):
                lane = self._free(len(frame) < _SMALL_BYTES)
                if lane is not None:
                    return lane.put(frame)
                self.room.changed.wait()
            return False

    def _free(self, small: bool) -> Lane | None:
        lanes = list(self._lanes.values())[:1] if small else self._lanes.values()
        return next((lane for lane in lanes if lane.free), None)

    def finish(self) -> None:
        """Let what was handed over leave, and end this side in order."""
        with self.room.changed:
            self.closing = True
            lanes = list(self._lanes.values())
            self.room.changed.notify_all()
        for lane in lanes:
            lane.finish()

    def end(self, why: str) -> None:
        """Break it, all lanes, for this reason; the first reason stays."""
        self._end(why, Lane.end)

    def _end(self, why: str, end_lane: Callable[[Lane, str], None]) -> None:
        with self.room.changed:
            if self.over:
                return
            self._why = why
            self._over.set()
            lanes, told, self._told = list(self._lanes.values()), self._told, []
            self.room.changed.notify_all()
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
            self._end(why, Lane.gone)
        else:
            with self.room.changed:
                self._lanes.pop(number, None)

    def wait_over(self, seconds: float) -> bool:
        """Wait so long for its end; whether that has come."""
        return self._over.wait(seconds)
