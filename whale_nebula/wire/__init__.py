"""The wire protocol, sans-I/O: frames, sessions, sealing, control messages.

Exported here is what every link needs; one that outlives its connections takes `wire.conversation` too.
"""

from whale_nebula.wire.assembly import Bound, Expect, MessageArrived, TensorArrived
from whale_nebula.wire.frame import (
    CHUNK_BYTES,
    FRAME_CAP,
    HEADER_BYTES,
    Direction,
    Flag,
    Header,
    Kind,
    wire_bytes,
)

__all__ = [
    "CHUNK_BYTES",
    "FRAME_CAP",
    "HEADER_BYTES",
    "Bound",
    "Direction",
    "Expect",
    "Flag",
    "Header",
    "Kind",
    "MessageArrived",
    "TensorArrived",
    "wire_bytes",
]
