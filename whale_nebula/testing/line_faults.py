"""What may happen to a frame on its way, and a line to which it does: for simulated runs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from whale_nebula.errors import OptionError, RemoteProtocolError
from whale_nebula.errors.suggestions import did_you_mean
from whale_nebula.testing.carrier import Cable, Passage
from whale_nebula.wire.frame import HEADER_BYTES, unpack


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
            raise OptionError(f"{text!r} is no fault of a line", mend="gpu/0>npu/0=cut:5@12")
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
            Ill.CORRUPT: (self._flipped(frame),),
            Ill.TRUNCATE: (frame[: self._draw.randrange(len(frame))],),
            Ill.LOSE: (),
        }[ill]

    def _overtaken(self, passage: Passage, cable: Cable) -> bytes:
        if _greets(passage.frame):  # a greeting is never overtaken: what follows waits for it
            return passage.frame
        self._sleep(0.01)
        return cable.overtake(passage.source) or passage.frame

    def _flipped(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        return bytes(data)


def _greets(frame: bytes) -> bool:
    try:
        return unpack(frame[:HEADER_BYTES], sealed=True)[0].epoch == 0
    except RemoteProtocolError:
        return False
