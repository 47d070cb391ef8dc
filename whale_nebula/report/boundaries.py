"""One direction of a boundary in a step: how many bytes it was and became, how exact it is, and what that cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BoundaryReport:
    """What this process sent and took in.

    `error` is the norm of what was lost, by the norm of the tensor: measured now and then, in steps 1, 2, 4 ... and
    every fiftieth, on the first micro-batch; None where it was not.

    >>> BoundaryReport(raw_bytes=400, payload_bytes=100, wire_bytes=120, frames=1).ratio
    0.3
    """

    codec: str = ""
    raw_bytes: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    frames: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: float | None = None
    clamped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes on the line for each byte of the tensor as it was."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 0.0

    def __add__(self, other: BoundaryReport) -> BoundaryReport:
        return BoundaryReport(
            other.codec or self.codec,
            self.raw_bytes + other.raw_bytes,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.frames + other.frames,
            self.encode_seconds + other.encode_seconds,
            self.decode_seconds + other.decode_seconds,
            self.error if other.error is None else other.error,
            self.clamped + other.clamped,
            (*self.notes, *(note for note in other.notes if note not in self.notes)),
        )
