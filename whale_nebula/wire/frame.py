"""The frame: a header of fixed size and up to one chunk of a tensor, or one control message.

A tensor is sent as frames of `CHUNK_BYTES`, of which the last may be shorter; an empty tensor is one frame without
payload. A control message (JSON) is one frame. `dtype` and `dims` are those of the model's tensor. If it is encoded
(`codec` is not 0), the payload is the codec's output: a row of `whole` bytes, which is not interpreted here. Numbers
are little-endian.

A sealed frame contains its chunk as ciphertext and a tag of `TAG_BYTES`: `length` counts both, and everything else is
as in an unsealed frame. It is valid only if there is a key, as the argument `sealed` of `pack_header` and
`unpack_header` states.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

import google_crc32c
import numpy as np

from whale_nebula.errors import DamagedFrameError, LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes, find_dtype

MAGIC = b"NBLA"
VERSION = 1
CHUNK_BYTES = 1 << 20
FRAME_CAP = 8 << 20
MAX_RANK = 8
TAG_BYTES = 16

# Magic and version, the fields of `Header` in its order (before the dims, of which there are always eight, is the
# rank), then the checksum of the payload and, last, that of all bytes before it.
_LAYOUT = struct.Struct("<4sB BHI QQQQ II HHI iI QQ HBBI B3x 8I II")
_CRC = struct.Struct("<I")
_MAX_BYTES = (1 << 63) - 1  # of an array, even if one of its sizes were 1 instead of 0
HEADER_BYTES = _LAYOUT.size
_KIND_AT = 5
MESSAGE_BYTES = FRAME_CAP - HEADER_BYTES - TAG_BYTES  # the longest control message


class Kind(IntEnum):
    """The type of a frame's content."""

    BOUNDARY = 1
    PART = 2
    SCALAR = 3
    RESULT = 4
    VALUE = 5  # a value of the runtime's own: a fingerprint, a seed
    CONTROL = 6  # a message, not a tensor
    ACK = 7  # only a header: an acknowledgement
    BEAT = 8  # only a header: a heartbeat, which also acknowledges
    ROUND = 9  # weights in local SGD: no step is announced for it


BARE = (Kind.ACK, Kind.BEAT)


class Direction(IntEnum):
    """Direction of a boundary's tensor: its value goes forward, its gradient backward."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


class Flag(IntFlag):
    """Bits of a frame: `LAST` ends a tensor or message, `SEALED` means that only the two workers can read it."""

    SEALED = 1
    LAST = 2


_KNOWN_FLAGS = int(Flag.SEALED | Flag.LAST)  # as a number: the complement of an IntFlag omits unknown bits


class Header(NamedTuple):
    """The fields of a frame's header. Workers are numbers here: their places in the sorted list of names.

    `ack` is the number of the next frame that the sender expects from the other side: all before it have arrived.
    `codec` is 0 if the payload is the tensor itself, and `state` the version of the state that a codec encoded with.
    """

    kind: int
    flags: int = 0
    conversation: int = 0
    sequence: int = 0
    ack: int = 0
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

    @property
    def encoded(self) -> bool:
        """Whether the payload was encoded by a codec."""
        return self.codec != 0


def count_wire_bytes(payload_bytes: int) -> int:
    """The bytes of a tensor of this size on the wire, including headers."""
    return payload_bytes + HEADER_BYTES * count_frames(payload_bytes)


def count_frames(payload_bytes: int) -> int:
    """The number of frames for a tensor of this size."""
    return max(1, -(-payload_bytes // CHUNK_BYTES))


def split_payload(header: Header, payload: Bytes) -> Iterator[tuple[Header, Bytes]]:
    """Every frame of a tensor or message as its header, not numbered yet, and a view of its chunk."""
    whole = payload.size
    step = max(whole, 1) if header.kind == Kind.CONTROL else CHUNK_BYTES
    for offset in range(0, max(whole, 1), step):
        chunk = payload[offset : offset + step]
        last = Flag.LAST if offset + chunk.size == whole else 0
        yield header._replace(flags=header.flags | last, offset=offset, length=chunk.size, whole=whole), chunk


def pack_header(header: Header, payload_crc: int, *, sealed: bool = False) -> bytes:
    """The bytes of one header, with both checksums. An invalid header is the caller's error."""
    if fault := find_fault(header, sealed=sealed):
        raise LocalProtocolError(f"invalid outgoing frame: {fault}")
    body = encode_header(header, payload_crc)[: -_CRC.size]
    return body + _CRC.pack(google_crc32c.value(body))


def encode_sealed_header(header: Header) -> bytes:
    """The header bytes that a seal authenticates with its chunk: all but `ack` and the checksums."""
    return encode_header(header._replace(ack=0), 0)


def encode_header(header: Header, payload_crc: int) -> bytes:
    """The bytes of a header, unchecked, and without its own checksum."""
    dims = header.dims + (0,) * (MAX_RANK - len(header.dims))
    try:
        return _LAYOUT.pack(MAGIC, VERSION, *header[:-1], len(header.dims), *dims, payload_crc, 0)
    except struct.error as error:
        raise LocalProtocolError(
            f"a number does not fit into its field of the frame: {error}", where=str(header)
        ) from None


def is_bare(frame: bytes) -> bool:
    """Whether a frame, not validated yet, is only a header: an acknowledgement or a heartbeat."""
    return len(frame) == HEADER_BYTES and frame[_KIND_AT] in BARE


def unpack_header(data: bytes, *, sealed: bool = False) -> tuple[Header, int]:
    """Parse these bytes; returns the header, with every field checked, and the checksum that its payload must have."""
    magic, version, *fields, payload_crc, header_crc = _LAYOUT.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise RemoteProtocolError(
            f"not a frame of this protocol: it starts with {magic!r}, version {version}",
            why=f"a frame must start with {MAGIC!r}, version {VERSION}",
            mend="install the same release of whale_nebula in every cluster",
        )
    if header_crc != google_crc32c.value(data[: -_CRC.size]):
        raise DamagedFrameError("the checksum of a frame's header is wrong")
    *plain, rank = fields[:-MAX_RANK]
    dims = fields[-MAX_RANK:]
    header = Header._make((*plain, tuple(dims[:rank])))
    fault = find_fault(header, sealed=sealed)
    if rank > MAX_RANK or any(dims[rank:]):
        fault = f"rank {rank} does not match sizes {dims}"
    if fault:
        raise RemoteProtocolError(f"invalid frame: {fault}")
    return header, payload_crc


def compute_checksum(chunk: Bytes) -> int:
    """The CRC-32C of a chunk.

    >>> hex(compute_checksum(np.frombuffer(b"123456789", np.uint8)))
    '0xe3069283'
    """
    return google_crc32c.value(chunk) if chunk.size else 0


def unseal_header(header: Header) -> Header:
    """The header of a sealed frame after decryption; any other header unchanged."""
    if not header.flags & Flag.SEALED:
        return header
    return header._replace(flags=header.flags & ~Flag.SEALED, length=header.length - TAG_BYTES)


def find_fault(header: Header, *, sealed: bool = False) -> str | None:
    """A description of the first fault in a header, or None. The rules are the same for both sides."""
    if header.kind in BARE:
        expected = Header(
            header.kind, Flag.LAST, header.conversation, 0, header.ack, 0, 0, header.source, header.destination
        )
        fault = f"a frame of kind {header.kind} has fields that an acknowledgement cannot have"
        return None if header == expected else fault
    if header.flags & Flag.SEALED and not sealed:
        return "the frame is sealed, but this link has no key"
    plain = unseal_header(header)
    if plain.kind not in Kind._value2member_map_:
        return f"kind {plain.kind} is unknown"
    if plain.flags & ~_KNOWN_FLAGS:
        return f"flags {plain.flags:#x} are unknown"
    directions = (Direction.FORWARD, Direction.BACKWARD) if plain.kind == Kind.BOUNDARY else (Direction.NONE,)
    if plain.direction not in directions:
        return f"kind {plain.kind} cannot have direction {plain.direction}"
    if plain.micro_batch < -1:
        return f"micro-batch {plain.micro_batch} is out of range"
    if tensor_fault := find_tensor_fault(plain):
        return tensor_fault
    limit = MESSAGE_BYTES if plain.kind == Kind.CONTROL else CHUNK_BYTES
    if plain.kind == Kind.CONTROL and plain.whole > limit:
        return f"a control message of {plain.whole} bytes exceeds the limit of {limit}"
    if plain.offset % limit or plain.length != min(limit, plain.whole - plain.offset):
        return f"invalid chunk of {plain.length} bytes at {plain.offset} of {plain.whole}"
    if plain.last != (plain.offset + plain.length == plain.whole):
        return f"the chunk at {plain.offset} of {plain.whole} is wrongly marked as last or not last"
    if plain.whole and not plain.length:
        return "empty chunk of a non-empty tensor"
    return None


def find_tensor_fault(header: Header) -> str | None:
    """A description of the first fault in the fields that describe the tensor, or None."""
    dtype = find_dtype(header.dtype)
    if dtype is None:
        return f"dtype {header.dtype} is unknown"
    if len(header.dims) > MAX_RANK:
        return f"rank {len(header.dims)} is above {MAX_RANK}"
    if header.state and not header.encoded:
        return f"state {header.state} without a codec"
    size = math.prod(header.dims) * dtype.itemsize
    if size != header.whole and not header.encoded:
        return f"{dtype.name}{list(header.dims)} has {size} bytes, not {header.whole}"
    if math.prod(max(size, 1) for size in header.dims) * dtype.itemsize > _MAX_BYTES:
        return f"{dtype.name}{list(header.dims)} is too large for an array"  # also limited for an empty one
    if header.kind != Kind.CONTROL:
        return None
    if dtype != np.uint8 or len(header.dims) != 1:
        return "a control message must be a row of bytes"
    if any((header.program, header.step, header.phase, header.shard, header.slot, header.codec, header.state)):
        return "a control message cannot belong to a step"
    return None if header.micro_batch == -1 else f"a control message cannot belong to micro-batch {header.micro_batch}"
