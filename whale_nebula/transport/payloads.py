"""Payloads as the wire describes them: arrays as they are, and what a codec made as a row of bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from whale_nebula.errors import LocalProtocolError
from whale_nebula.transport.protocol import Packed, Payload
from whale_nebula.wire.decoder import TensorArrived
from whale_nebula.wire.frame import Flag, Header, Kind, find_fault
from whale_nebula.wire.tensor import Bytes, array_bytes, dtype_code, dtype_of

_MOST_CODEC, _MOST_NUMBER = (1 << 16) - 1, (1 << 32) - 1


class Described(NamedTuple):
    """A payload on its way out: its header, its bytes, and what it was before a codec."""

    header: Header
    data: Bytes
    raw_bytes: int


def described(header: Header, payload: Payload) -> Described:
    """A payload under the header of its key.

    >>> packed = Packed(np.zeros(5, np.uint8), codec=3, state=9, dtype="float32", dims=(4, 8))
    >>> sent = described(Header(Kind.SCALAR), packed)
    >>> sent.header.codec, sent.header.state, sent.header.dims, sent.data.size, sent.raw_bytes
    (3, 9, (4, 8), 5, 128)
    """
    if isinstance(payload, Packed):
        checked(payload)
        return Described(_with(header, payload), payload.data, payload.raw_bytes)
    array = np.asarray(payload)
    header = header._replace(dtype=dtype_code(array.dtype.name), dims=array.shape)
    return Described(header, array_bytes(array), array.nbytes)


def arrived(event: TensorArrived) -> Payload:
    """What came, as it was sent."""
    header, dtype = event.header, dtype_of(event.header.dtype)
    if not header.encoded or dtype is None:
        return event.array
    return Packed(event.array, header.codec, header.state, dtype.name, header.dims)


def checked(packed: Packed) -> Packed:
    """Refuse what no frame can say, wherever it goes: a memory link takes no more than the others."""
    fault = _fault(packed)
    if fault:
        raise LocalProtocolError(f"this Packed cannot cross a link: {fault}")
    return packed


def _fault(packed: Packed) -> str | None:
    data: Any = packed.data
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        return "its data is no row of bytes"
    if not 1 <= packed.codec <= _MOST_CODEC:
        return f"codec {packed.codec}; what no codec made is sent as an array"
    if not 0 <= packed.state <= _MOST_NUMBER:
        return f"state {packed.state}"
    if not all(0 <= size <= _MOST_NUMBER for size in packed.dims):
        return f"sizes {packed.dims}"
    return find_fault(_with(Header(Kind.SCALAR, flags=Flag.LAST), packed))


def _with(header: Header, packed: Packed) -> Header:
    return header._replace(
        codec=packed.codec, state=packed.state, dtype=dtype_code(packed.dtype), dims=tuple(packed.dims)
    )
