"""Two carriers joined in memory, with a filter that injects faults into the frames between them, for tests of links.

It behaves like a network: each direction keeps its order unless the filter reorders frames, a full line blocks its
sender, and a disconnection loses the frames in transit and is followed by a new connection.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeAlias

from whale_nebula.errors import NebulaError, OptionError, RemoteProtocolError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.transport.base import CarrierState, Receiver
from whale_nebula.wire.frame import HEADER_BYTES, unpack_header
from whale_nebula.wire.tensor import Bytes

_MOST_IN_FLIGHT = 4  # frames in transit


class Passage(NamedTuple):
    """A frame in transit: its source, its number among the frames of that source (from 0), and its bytes."""

    source: str
    number: int
    frame: bytes


FrameFilter: TypeAlias = Callable[[Passage], Iterable[bytes]]
"""Returns the frames that arrive in place of one. It may wait (a delay) or disconnect the cable."""


def pass_unchanged(passage: Passage) -> Iterable[bytes]:
    """The filter of an undisturbed line."""
    return (passage.frame,)


class Cable:
    """The line between two workers; `ends` are their carriers. It is connected once both have started.

    `disconnect` breaks it; it is connected again at once, or at `reconnect` with `reconnects=False`. `kill` removes one
    worker permanently, as its death would.
    """

    def __init__(self, here: str, there: str, frame_filter: FrameFilter = pass_unchanged) -> None:
        self.frame_filter = frame_filter
        self._changed = threading.Condition()
        self._connection = 0  # the number of the current connection, negative while there is none
        self._queues: dict[str, deque[bytes]] = {here: deque(), there: deque()}  # by source
        self._counts = dict.fromkeys((here, there), 0)
        self._locks = {here: threading.RLock(), there: threading.RLock()}
        self._work: deque[Callable[[], None]] = deque()
        self._is_working = False
        self._receivers: dict[str, Receiver] = {}
        self._closed: set[str] = set()
        self.ends = MemoryCarrier(self, here, there), MemoryCarrier(self, there, here)
        for source, target in ((here, there), (there, here)):
            _start_thread(f"nebula-line-{source}", partial(self._deliver, source, target))
        _start_thread("nebula-line-keeper", self._run_work)

    @property
    def connected(self) -> bool:
        """Whether a connection exists."""
        return self._connection > 0

    @property
    def connection(self) -> int:
        """The number of the current connection; at most 0 while there is none."""
        return self._connection

    def disconnect(self, why: str = "the cable is cut", *, reconnects: bool = True) -> None:
        """Break the connection soon; frames in transit are lost. Use `wait` to wait for it."""
        self._schedule(lambda: self._break_connection(why))
        if reconnects:
            self.reconnect()

    def reconnect(self) -> None:
        """Connect again."""
        self._schedule(self._connect)

    def wait(self, *, connected: bool, seconds: float) -> bool:
        """Wait until both ends are notified that the cable is connected, or is not; returns whether they are.

        A frame filter must not call it, as the cable waits for the filter.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.connected == connected and not self._is_working, timeout=seconds)

    def swap_next(self, source: str) -> bytes | None:
        """For a filter: swap the current frame with the next one, which is returned; None if there is none."""
        with self._changed:
            queue = self._queues[source]
            if len(queue) < 2:
                return None
            queue[0], queue[1] = queue[1], queue[0]
            return queue[0]

    def kill(self, worker: str, error: NebulaError) -> None:
        """Remove one worker: the other one's carrier gives up with this error."""
        self._schedule(lambda: self._break_connection("it is gone"))
        for other in self._locks.keys() - {worker}:
            self._schedule(partial(self._report_loss, other, error))

    def _attach(self, worker: str, receiver: Receiver) -> None:
        with self._changed:
            self._receivers[worker] = receiver
            self._closed.discard(worker)  # another process of a worker that has closed its end
            if len(self._receivers) == len(self._locks):
                self.reconnect()

    def _queue_frame(self, source: str, connection: int, frame: bytes) -> bool:
        with self._changed:
            queue = self._queues[source]
            self._changed.wait_for(lambda: self._connection != connection or len(queue) < _MOST_IN_FLIGHT)
            if self._connection != connection:
                return False
            queue.append(frame)
            self._changed.notify_all()
            return True

    def _close(self, worker: str) -> None:
        """Close one end: sent frames still arrive, then the connection ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queues[worker] or self._connection < 0, timeout=5.0)
            self._closed.add(worker)
            self._schedule(lambda: self._break_connection("the other side has closed"))

    # The threads: one for each direction, and one that connects and disconnects.

    def _deliver(self, source: str, target: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queues[source] or self._is_over)
                if self._is_over:
                    return
                connection, number = self._connection, self._counts[source]
                frame = self._queues[source][0]
                self._counts[source] += 1
            for each in self.frame_filter(Passage(source, number, frame)):
                with self._locks[target]:
                    if self._connection == connection and target not in self._closed:
                        self._receivers[target].message(bytes(each))
            with self._changed:
                if self._connection == connection:
                    self._queues[source].popleft()
                self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return len(self._closed) == len(self._locks) and not self._work

    def _run_work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._is_over)
                if not self._work:
                    return
                work = self._work.popleft()
                self._is_working = True
            work()
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _schedule(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def _connect(self) -> None:
        with self._lock_both():
            with self._changed:
                if self._connection > 0 or self._closed:
                    return
                self._connection = 1 - self._connection
            for receiver in self._receivers.values():
                receiver.up(self._connection)

    def _report_loss(self, worker: str, error: NebulaError) -> None:
        with self._locks[worker]:
            self._receivers[worker].lost(error)

    def _break_connection(self, why: str) -> None:
        with self._lock_both():
            with self._changed:
                if self._connection <= 0:
                    return
                self._connection = -self._connection
                for queue in self._queues.values():
                    queue.clear()
                self._changed.notify_all()
            for worker, receiver in self._receivers.items():
                if worker not in self._closed:
                    receiver.down(why)

    @contextlib.contextmanager
    def _lock_both(self) -> Iterator[None]:
        here, there = self._locks.values()
        with here, there:
            yield


class MemoryCarrier:
    """One end of a cable."""

    def __init__(self, cable: Cable, here: str, there: str) -> None:
        self.here = here
        self.there = there
        self.where = "memory"
        self._cable = cable

    def start(self, receiver: Receiver) -> None:
        self._cable._attach(self.here, receiver)

    def send(self, connection: int, header: bytes, chunk: Bytes) -> bool:
        frame = header + chunk.tobytes()
        return self._cable._queue_frame(self.here, connection, frame)

    def opened(self) -> None:
        """There is only one lane."""

    def drop(self, why: str) -> None:
        self._cable.disconnect(why)

    def pace(self, rate: float) -> None:
        """The rate has no effect here."""

    def close(self) -> None:
        self._cable._close(self.here)

    def state(self) -> CarrierState:
        return CarrierState(connected=self._cable.connected, connections=abs(self._cable._connection))


def _start_thread(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


class LineFaultKind(StrEnum):
    """A fault of one frame, or of the connection when this frame is in transit."""

    CUT = "cut"  # the connection breaks, and is restored after this many seconds
    RESET = "reset"  # it breaks, and is restored at once
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # the next frame overtakes it
    CORRUPT = "corrupt"  # one bit
    TRUNCATE = "truncate"
    REPLAY = "replay"  # an earlier frame of this direction is repeated before it
    SILENCE = "silence"  # nothing passes in this direction for this many seconds
    LOSE = "lose"  # only the frame is lost: no network does that, a faulty gateway might


@dataclass(frozen=True, slots=True)
class LineFault:
    """A fault at the `number`-th frame (from 0) from `source` to `destination`.

    >>> print(LineFault.parse("gpu/0>npu/0=cut:5@12"))
    gpu/0>npu/0=cut:5@12
    """

    source: str
    destination: str
    kind: LineFaultKind
    number: int
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LineFault:
        """Read one: `SOURCE>DESTINATION=ILL[:SECONDS]@NUMBER`."""
        match = _FAULT.fullmatch(text.strip())
        if match is None:
            raise OptionError(f"{text!r} is not a fault of a line", mend="gpu/0>npu/0=cut:5@12")
        source, destination, kind, seconds, number = match.groups()
        if kind not in list(LineFaultKind):
            raise OptionError(
                f"there is no {kind!r} for a line", mend=did_you_mean(kind, [each.value for each in LineFaultKind])
            )
        return cls(source, destination, LineFaultKind(kind), int(number), float(seconds or 0))

    def __str__(self) -> str:
        seconds = f":{self.seconds:g}" if self.seconds else ""
        return f"{self.source}>{self.destination}={self.kind}{seconds}@{self.number}"


_FAULT = re.compile(r"([\w./-]+)>([\w./-]+)=(\w+)(?::(\d+(?:\.\d*)?))?@(\d+)")


class FaultyLine:
    """A frame filter that injects these faults. `sleep` and `schedule` use the simulated clock."""

    def __init__(
        self,
        faults: Iterable[LineFault],
        draw: random.Random,
        sleep: Callable[[float], None],
        schedule: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.cable: Cable | None = None
        self.applied_faults: list[LineFault] = []
        self._faults = {(fault.source, fault.number): fault for fault in faults}
        self._draw = draw
        self._sleep = sleep
        self._schedule = schedule
        self._earlier: dict[str, list[bytes]] = {}

    def __call__(self, passage: Passage) -> Iterable[bytes]:
        """What arrives in place of a frame."""
        fault = self._faults.get((passage.source, passage.number))
        earlier = self._earlier.setdefault(passage.source, [])
        earlier.append(passage.frame)
        if fault is None or self.cable is None:
            return (passage.frame,)
        self.applied_faults.append(fault)
        return self._apply_fault(fault, passage, self.cable, earlier[:-1])

    def _apply_fault(self, fault: LineFault, passage: Passage, cable: Cable, earlier: list[bytes]) -> Iterable[bytes]:
        frame, kind = passage.frame, fault.kind
        if kind in (LineFaultKind.CUT, LineFaultKind.RESET):
            connection = cable.connection
            cable.disconnect(f"the line: {fault}", reconnects=kind is LineFaultKind.RESET)
            while cable.connection == connection:  # later frames wait for it
                self._sleep(0.0)
            if kind is LineFaultKind.CUT:
                self._schedule(fault.seconds, cable.reconnect)
            return ()
        if kind is LineFaultKind.SILENCE:
            self._sleep(fault.seconds)
            return (frame,)
        if kind is LineFaultKind.REORDER:
            return (self._reorder(passage, cable),)
        if kind is LineFaultKind.REPLAY:
            return (self._draw.choice(earlier), frame) if earlier else (frame,)
        return {
            LineFaultKind.DUPLICATE: (frame, frame),
            LineFaultKind.CORRUPT: (self._flip_bit(frame),),
            LineFaultKind.TRUNCATE: (frame[: self._draw.randrange(len(frame))],),
            LineFaultKind.LOSE: (),
        }[kind]

    def _reorder(self, passage: Passage, cable: Cable) -> bytes:
        if _is_greeting(passage.frame):  # greetings are not reordered: later frames wait for them
            return passage.frame
        self._sleep(0.01)
        return cable.swap_next(passage.source) or passage.frame

    def _flip_bit(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        return bytes(data)


def _is_greeting(frame: bytes) -> bool:
    try:
        return unpack_header(frame[:HEADER_BYTES], sealed=True)[0].conversation == 0
    except RemoteProtocolError:
        return False
