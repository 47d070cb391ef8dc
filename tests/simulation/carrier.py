"""Two carriers joined in memory, with a plan of faults for the frames between them: for tests of links.

It behaves like a network: each direction keeps its order unless the plan says otherwise, a sender notices that the line
is full, a cut loses what is in flight, and is followed by a new connection.
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
from whale_nebula.wire.frame import HEADER_BYTES, unpack
from whale_nebula.wire.tensor import Bytes

_ROOM = 4  # frames on their way


class Passage(NamedTuple):
    """A frame on its way: from which worker, the how many-th of that side (from 0), and its bytes."""

    source: str
    number: int
    frame: bytes


Plan: TypeAlias = Callable[[Passage], Iterable[bytes]]
"""What arrives in place of a frame: nothing, it, it twice, another. It may wait (a delay) or cut the cable."""


def nothing_happens(passage: Passage) -> Iterable[bytes]:
    """The plan of an undisturbed line."""
    return (passage.frame,)


class Cable:
    """The line between two workers; `ends` are their carriers. It is connected once both have started.

    `cut` breaks it; it is connected again at once, or at `mend` if it was cut with `mends=False`. `kill` takes one
    worker off for good, as its death would.
    """

    def __init__(self, here: str, there: str, plan: Plan = nothing_happens) -> None:
        self.plan = plan
        self._changed = threading.Condition()
        self._connection = 0  # the present one's number, negative while there is none
        self._queues: dict[str, deque[bytes]] = {here: deque(), there: deque()}  # by source
        self._counts = dict.fromkeys((here, there), 0)
        self._gates = {here: threading.RLock(), there: threading.RLock()}
        self._work: deque[Callable[[], None]] = deque()
        self._working = False
        self._receivers: dict[str, Receiver] = {}
        self._closed: set[str] = set()
        self.ends = MemoryCarrier(self, here, there), MemoryCarrier(self, there, here)
        for source, target in ((here, there), (there, here)):
            _thread(f"nebula-line-{source}", partial(self._deliver, source, target))
        _thread("nebula-line-keeper", self._keep)

    @property
    def connected(self) -> bool:
        """Whether frames pass."""
        return self._connection > 0

    @property
    def connection(self) -> int:
        """The number of the present connection; not above 0 while there is none."""
        return self._connection

    def cut(self, why: str = "the cable is cut", *, mends: bool = True) -> None:
        """Break the connection, soon; what is on its way is lost. `wait` tells when."""
        self._later(lambda: self._break(why))
        if mends:
            self.mend()

    def mend(self) -> None:
        """Connect again."""
        self._later(self._join)

    def wait(self, *, connected: bool, seconds: float) -> bool:
        """Until both ends have felt it that the cable is connected, or is not; False if it is still otherwise.

        A plan must not call it: the cable waits for the plan.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.connected == connected and not self._working, timeout=seconds)

    def overtake(self, source: str) -> bytes | None:
        """For a plan: the frame behind the present one takes its place, and it comes next. None if there is none."""
        with self._changed:
            queue = self._queues[source]
            if len(queue) < 2:
                return None
            queue[0], queue[1] = queue[1], queue[0]
            return queue[0]

    def kill(self, worker: str, error: NebulaError) -> None:
        """Take one worker away: the other one's carrier gives up with this error."""
        self._later(lambda: self._break("it is gone"))
        for other in self._gates.keys() - {worker}:
            self._later(partial(self._lose, other, error))

    def _started(self, worker: str, receiver: Receiver) -> None:
        with self._changed:
            self._receivers[worker] = receiver
            self._closed.discard(worker)  # another process of a worker that has left
            if len(self._receivers) == len(self._gates):
                self.mend()

    def _carry(self, source: str, connection: int, frame: bytes) -> bool:
        with self._changed:
            queue = self._queues[source]
            self._changed.wait_for(lambda: self._connection != connection or len(queue) < _ROOM)
            if self._connection != connection:
                return False
            queue.append(frame)
            self._changed.notify_all()
            return True

    def _close(self, worker: str) -> None:
        """One end leaves: what it sent still arrives, then the connection ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queues[worker] or self._connection < 0, timeout=5.0)
            self._closed.add(worker)
            self._later(lambda: self._break("the other side has closed"))

    # The threads: one for each way, and one that connects and breaks.

    def _deliver(self, source: str, target: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queues[source] or self._over)
                if self._over:
                    return
                connection, number = self._connection, self._counts[source]
                frame = self._queues[source][0]
                self._counts[source] += 1
            for each in self.plan(Passage(source, number, frame)):
                with self._gates[target]:
                    if self._connection == connection and target not in self._closed:
                        self._receivers[target].message(bytes(each))
            with self._changed:
                if self._connection == connection:
                    self._queues[source].popleft()
                self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return len(self._closed) == len(self._gates) and not self._work

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._over)
                if not self._work:
                    return
                work = self._work.popleft()
                self._working = True
            work()
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _later(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def _join(self) -> None:
        with self._both_gates():
            with self._changed:
                if self._connection > 0 or self._closed:
                    return
                self._connection = 1 - self._connection
            for receiver in self._receivers.values():
                receiver.up(self._connection)

    def _lose(self, worker: str, error: NebulaError) -> None:
        with self._gates[worker]:
            self._receivers[worker].lost(error)

    def _break(self, why: str) -> None:
        with self._both_gates():
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
    def _both_gates(self) -> Iterator[None]:
        here, there = self._gates.values()
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
        self._cable._started(self.here, receiver)

    def send(self, connection: int, header: bytes, chunk: Bytes) -> bool:
        frame = header + chunk.tobytes()
        return self._cable._carry(self.here, connection, frame)

    def opened(self) -> None:
        """One lane is all that there is."""

    def drop(self, why: str) -> None:
        self._cable.cut(why)

    def pace(self, rate: float) -> None:
        """Nothing depends on the rate here."""

    def close(self) -> None:
        self._cable._close(self.here)

    def state(self) -> CarrierState:
        return CarrierState(connected=self._cable.connected, connections=abs(self._cable._connection))


def _thread(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


class Ill(StrEnum):
    """What happens to one frame, or to the connection when this frame is on its way."""

    CUT = "cut"  # the connection breaks, and is there again after so many seconds
    RESET = "reset"  # it breaks, and is there again at once
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # the next frame overtakes it
    CORRUPT = "corrupt"  # one bit
    TRUNCATE = "truncate"
    REPLAY = "replay"  # an earlier frame of this way comes again, before it
    SILENCE = "silence"  # nothing passes this way for so many seconds
    LOSE = "lose"  # it alone, and the connection stays: no network does that, a bad gateway might


@dataclass(frozen=True, slots=True)
class LineFault:
    """What happens to the `number`-th frame (from 0) from `source` to `destination`.

    >>> print(LineFault.parse("gpu/0>npu/0=cut:5@12"))
    gpu/0>npu/0=cut:5@12
    """

    source: str
    destination: str
    ill: Ill
    number: int
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LineFault:
        """Read one: `SOURCE>DESTINATION=ILL[:SECONDS]@NUMBER`."""
        found = _FAULT.fullmatch(text.strip())
        if found is None:
            raise OptionError(f"{text!r} is not a fault of a line", mend="gpu/0>npu/0=cut:5@12")
        source, destination, ill, seconds, number = found.groups()
        if ill not in list(Ill):
            raise OptionError(f"there is no {ill!r} for a line", mend=did_you_mean(ill, [each.value for each in Ill]))
        return cls(source, destination, Ill(ill), int(number), float(seconds or 0))

    def __str__(self) -> str:
        seconds = f":{self.seconds:g}" if self.seconds else ""
        return f"{self.source}>{self.destination}={self.ill}{seconds}@{self.number}"


_FAULT = re.compile(r"([\w./-]+)>([\w./-]+)=(\w+)(?::(\d+(?:\.\d*)?))?@(\d+)")


class BadLine:
    """The plan of a cable on which these faults happen. `sleep` and `later` are those of the run's clock."""

    def __init__(
        self,
        faults: Iterable[LineFault],
        draw: random.Random,
        sleep: Callable[[float], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.cable: Cable | None = None
        self.struck: list[LineFault] = []
        self._faults = {(fault.source, fault.number): fault for fault in faults}
        self._draw = draw
        self._sleep = sleep
        self._later = later
        self._earlier: dict[str, list[bytes]] = {}

    def __call__(self, passage: Passage) -> Iterable[bytes]:
        """What arrives in place of a frame."""
        fault = self._faults.get((passage.source, passage.number))
        earlier = self._earlier.setdefault(passage.source, [])
        earlier.append(passage.frame)
        if fault is None or self.cable is None:
            return (passage.frame,)
        self.struck.append(fault)
        return self._happen(fault, passage, self.cable, earlier[:-1])

    def _happen(self, fault: LineFault, passage: Passage, cable: Cable, earlier: list[bytes]) -> Iterable[bytes]:
        frame, ill = passage.frame, fault.ill
        if ill in (Ill.CUT, Ill.RESET):
            broken = cable.connection
            cable.cut(f"the line: {fault}", mends=ill is Ill.RESET)
            while cable.connection == broken:  # nothing that follows passes it
                self._sleep(0.0)
            if ill is Ill.CUT:
                self._later(fault.seconds, cable.mend)
            return ()
        if ill is Ill.SILENCE:
            self._sleep(fault.seconds)
            return (frame,)
        if ill is Ill.REORDER:
            return (self._overtaken(passage, cable),)
        if ill is Ill.REPLAY:
            return (self._draw.choice(earlier), frame) if earlier else (frame,)
        return {
            Ill.DUPLICATE: (frame, frame),
            Ill.CORRUPT: (self._flip_bit(frame),),
            Ill.TRUNCATE: (frame[: self._draw.randrange(len(frame))],),
            Ill.LOSE: (),
        }[ill]

    def _overtaken(self, passage: Passage, cable: Cable) -> bytes:
        if _greets(passage.frame):  # a greeting is never overtaken: what follows waits for it
            return passage.frame
        self._sleep(0.01)
        return cable.overtake(passage.source) or passage.frame

    def _flip_bit(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        return bytes(data)


def _greets(frame: bytes) -> bool:
    try:
        return unpack(frame[:HEADER_BYTES], sealed=True)[0].conversation == 0
    except RemoteProtocolError:
        return False
