"""The frame: a header of fixed size and up to one chunk of a tensor, or one control message.

A tensor travels as frames of `CHUNK_BYTES` each but the last, which may be shorter; an empty tensor is one
frame without payload. A control message (JSON) is one frame. The header describes the tensor as it is sent:
after a codec, `dtype` and `dims` are those of what the codec made. Numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

import google_crc32c
import numpy as np

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes, dtype_of

MAGIC = b"NBLA"
VERSION = 1
CHUNK_BYTES = 1 << 20
FRAME_CAP = 8 << 20
MAX_RANK = 8

# Magic and version, the fields of `Header` in its order (before the dims, of which there are always eight,
# stands the rank), then the checksum of the payload and, last, that of all bytes before it.
_LAYOUT = struct.Struct("<4sB BHI QQQ II HHI iI QQ HBBI B3x 8I II")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size


class Kind(IntEnum):
    """What a frame carries."""

    BOUNDARY = 1
    PART = 2
    SCALAR = 3
    RESULT = 4
    VALUE = 5  # of the runtime's own: a fingerprint, a seed
    CONTROL = 6  # a message, not a tensor


class Direction(IntEnum):
    """Which way along the model a boundary's tensor goes: its value forward, its gradient backward."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


class Flag(IntFlag):
    """Bits of a frame: `LAST` ends a tensor, `SEALED` is kept for payloads that only the workers can read."""

    SEALED = 1
    LAST = 2


_KNOWN_FLAGS = int(
    Flag.SEALED | Flag.LAST
)  # as a number: the complement of an IntFlag leaves unknown bits out


class Header(NamedTuple):
    """The fields of a frame's header. Workers are numbers here: their places in the sorted list of names."""

    kind: int
    flags: int = 0
    epoch: int = 0
    sequence: int = 0
    program: int = 0
    step: int = 0
    source: int = 0
    destination: int = 0
    phase: int = 0
    shard: int = 0
    slot: int = 0
    micro_batch: int = -1
    length: int = 0
    offset: int = 0
    whole: int = 0
    codec: int = 0
    direction: int = Direction.NONE
    dtype: int = 0
    state: int = 0
    dims: tuple[int, ...] = ()

    @property
    def last(self) -> bool:
        """Whether this frame ends its tensor."""
        return bool(self.flags & Flag.LAST)


def wire_bytes(payload_bytes: int) -> int:
    """How many bytes a tensor of so many bytes is on the wire, headers included.

    >>> wire_bytes(0) == HEADER_BYTES, wire_bytes(CHUNK_BYTES + 1) - CHUNK_BYTES - 1 == 2 * HEADER_BYTES
    (True, True)
    """
    return payload_bytes + HEADER_BYTES * frame_count(payload_bytes)


def frame_count(payload_bytes: int) -> int:
    """How many frames carry a tensor of so many bytes.

    >>> frame_count(0), frame_count(CHUNK_BYTES), frame_count(CHUNK_BYTES + 1)
    (1, 1, 2)
    """
    return max(1, -(-payload_bytes // CHUNK_BYTES))


def chunks(header: Header, payload: Bytes) -> Iterator[tuple[Header, Bytes]]:
    """Every frame of a tensor or message as its header, not numbered yet, and a view of its chunk."""
    whole = payload.size
    step = max(whole, 1) if header.kind == Kind.CONTROL else CHUNK_BYTES
    for offset in range(0, max(whole, 1), step):
        chunk = payload[offset : offset + step]
        last = Flag.LAST if offset + chunk.size == whole else 0
        yield header._replace(flags=header.flags | last, offset=offset, length=chunk.size, whole=whole), chunk


def frames(header: Header, payload: Bytes) -> Iterator[tuple[bytes, Bytes]]:
    """Every frame as the bytes of its header and a view of its chunk, numbered from `header.sequence` on."""
    for number, (each, chunk) in enumerate(chunks(header, payload), start=header.sequence):
        yield pack(each._replace(sequence=number), checksum(chunk)), chunk


def pack(header: Header, payload_crc: int) -> bytes:
    """The bytes of one header, with both checksums. A header that breaks a rule is the caller's mistake."""
    if fault := find_fault(header):
        raise LocalProtocolError(f"this frame must not be sent: {fault}")
    dims = header.dims + (0,) * (MAX_RANK - len(header.dims))
    try:
        packed = _LAYOUT.pack(MAGIC, VERSION, *header[:-1], len(header.dims), *dims, payload_crc, 0)
    except struct.error as error:
        raise LocalProtocolError(
            f"a number does not fit its field of the frame: {error}", where=str(header)
        ) from None
    body = packed[: -_CRC.size]
    return body + _CRC.pack(google_crc32c.value(body))


def unpack(data: bytes) -> tuple[Header, int]:
    """The header in these bytes, checked in every field, and the checksum that its payload must have."""
    magic, version, *fields, payload_crc, header_crc = _LAYOUT.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise RemoteProtocolError(
            f"no frame of this protocol: it starts with {magic!r}, version {version}",
            why=f"frames start with {MAGIC!r}, version {VERSION}",
            mend="install the same release of whale_nebula in every cluster",
        )
    if header_crc != google_crc32c.value(data[: -_CRC.size]):
        raise RemoteProtocolError("the checksum of a frame's header is wrong")
    *plain, rank = fields[:-MAX_RANK]
    dims = fields[-MAX_RANK:]
    header = Header._make((*plain, tuple(dims[:rank])))
    if (
        fault := f"rank {rank} with sizes {dims}"
        if rank > MAX_RANK or any(dims[rank:])
        else find_fault(header)
    ):
        raise RemoteProtocolError(f"a frame breaks the protocol: {fault}")
    return header, payload_crc


def checksum(chunk: Bytes) -> int:
    """The CRC-32C of a chunk.

    >>> hex(checksum(np.frombuffer(b"123456789", np.uint8)))
    '0xe3069283'
    """
    return google_crc32c.value(chunk) if chunk.size else 0


def find_fault(header: Header) -> str | None:
    """What breaks the rules within one header, in words, or None. The rules are the same for both sides."""
    return _fault_of_kind(header) or _fault_of_tensor(header) or _fault_of_chunk(header)


def _fault_of_kind(header: Header) -> str | None:
    if header.kind not in Kind._value2member_map_:
        return f"kind {header.kind} is unknown"
    if header.flags & ~_KNOWN_FLAGS:
        return f"flags {header.flags:#x} are unknown"
    if header.flags & Flag.SEALED:
        return "the frame is sealed, and this link has no key"
    ways = (Direction.FORWARD, Direction.BACKWARD) if header.kind == Kind.BOUNDARY else (Direction.NONE,)
    if header.direction not in ways:
        return f"kind {header.kind} with direction {header.direction}"
    return f"micro-batch {header.micro_batch}" if header.micro_batch < -1 else None


def _fault_of_tensor(header: Header) -> str | None:
    dtype = dtype_of(header.dtype)
    if dtype is None:
        return f"dtype {header.dtype} is unknown"
    if len(header.dims) > MAX_RANK:
        return f"rank {len(header.dims)} is above {MAX_RANK}"
    size = math.prod(header.dims) * dtype.itemsize
    if size != header.whole:
        return f"{dtype.name}{list(header.dims)} has {size} bytes, not {header.whole}"
    if header.kind == Kind.CONTROL and (dtype != np.uint8 or len(header.dims) != 1):
        return "a control message is a row of bytes"
    return None


def _fault_of_chunk(header: Header) -> str | None:
    most = FRAME_CAP - HEADER_BYTES if header.kind == Kind.CONTROL else CHUNK_BYTES
    if header.kind == Kind.CONTROL and header.whole > most:
        return f"a control message of {header.whole} bytes is above the cap of {most}"
    if header.offset % most or header.length != min(most, header.whole - header.offset):
        return f"a chunk of {header.length} bytes at {header.offset} of {header.whole}"
    if header.last != (header.offset + header.length == header.whole):
        return f"the chunk at {header.offset} of {header.whole} is wrongly marked as last or not last"
    if header.whole and not header.length:
        return "an empty chunk of a tensor that is not empty"
    return None
