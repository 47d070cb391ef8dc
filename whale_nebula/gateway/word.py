"""What gateways say to each other: control messages, each in a frame, over a stream of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import HEADER_BYTES, Flag, Header, Kind, checksum, pack, unpack
from whale_nebula.wire.message import decode_message, encode_message
from whale_nebula.wire.tensor import dtype_code

HEAD, KEPT, REFUSED, GONE = "HEAD", "KEPT", "REFUSED", "GONE"
"""A head of the sender's audit log; that it was kept, or was not; that a worker of the sender's cluster is gone."""
_MOST = 64 << 10


def written(message: Mapping[str, Any]) -> bytes:
    """A message as a frame.

    >>> read(written({"kind": "KEPT", "seq": 99}))
    {'kind': 'KEPT', 'seq': 99}
    """
    data = encode_message(message)
    size = len(data)
    header = Header(Kind.CONTROL, Flag.LAST, dtype=dtype_code("uint8"), dims=(size,), length=size, whole=size)
    return pack(header, checksum(np.frombuffer(data, np.uint8))) + data


def read(frame: bytes) -> dict[str, Any]:
    """The message in a frame; anything else is the other side's mistake."""
    if not HEADER_BYTES <= len(frame) <= _MOST:
        raise RemoteProtocolError(f"a message of {len(frame)} bytes is no word between gateways")
    header, crc = unpack(frame[:HEADER_BYTES])
    data = frame[HEADER_BYTES:]
    if header.kind != Kind.CONTROL or header.length != len(data) or checksum(np.frombuffer(data, np.uint8)) != crc:
        raise RemoteProtocolError("this is no word between gateways")
    return decode_message(data)
