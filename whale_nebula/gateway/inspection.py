"""What a gateway sees of a frame: its header. Whatever is wrong with it is not handed on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import FRAME_CAP, HEADER_BYTES, Header, unpack


class Inspection:
    """The rules for the frames of one pair of workers, in both directions.

    `numbers` are what the wire calls the two workers. Where they are not known, the first frame tells, and all
    others must agree with it.

    >>> Inspection.of(("gpu/0", "npu/0", "npu/1"), "npu/1", "gpu/0").numbers
    (2, 0)
    """

    def __init__(self, numbers: tuple[int, int] | None = None) -> None:
        self.numbers = numbers
        self._lock = threading.Lock()

    @classmethod
    def of(cls, roster: Sequence[str] | None, here: str, there: str) -> Inspection:
        """For a worker of this cluster and one of another; `roster` is None where some workers are not known."""
        return cls(None if roster is None else (roster.index(here), roster.index(there)))

    def check(self, frame: bytes, *, outward: bool) -> Header:
        """The header of a frame that goes out of this cluster, or comes in; raises if it breaks a rule."""
        if not HEADER_BYTES <= len(frame) <= FRAME_CAP:
            raise RemoteProtocolError(f"a message of {len(frame)} bytes is no frame")
        header, _ = unpack(frame[:HEADER_BYTES], sealed=True)
        if len(frame) != HEADER_BYTES + header.length:
            raise RemoteProtocolError(f"{len(frame) - HEADER_BYTES} bytes came in a frame of {header.length}")
        ends = (header.source, header.destination)
        if (ends if outward else ends[::-1]) != self._known(ends if outward else ends[::-1]):
            raise RemoteProtocolError(
                f"a frame from worker {ends[0]} to worker {ends[1]}, which is not the pair of this stream",
                why="a worker speaks for itself only",
            )
        return header

    def _known(self, ends: tuple[int, int]) -> tuple[int, int]:
        if self.numbers is None:
            if ends[0] == ends[1]:
                raise RemoteProtocolError(f"a frame from worker {ends[0]} to itself")
            with self._lock:
                self.numbers = self.numbers or ends
        return self.numbers
