"""The frames between an owner's data service and its readers: a header, JSON, and rows as plain bytes.

Headers are checked against the expected sizes before memory is allocated.
"""

from __future__ import annotations

import json
import ssl
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whale_nebula.errors import AccessError

HELLO, ASK, ANSWER, BATCH, END, REFUSED = range(1, 7)
MOST_JSON = 64 << 10
_HEADER = struct.Struct("!4sBII")
_MAGIC = b"NBD1"


class Frame(NamedTuple):
    """A frame: its kind, its JSON, and its bytes."""

    kind: int
    said: dict[str, Any]
    data: memoryview


def write_frame(line: ssl.SSLSocket, kind: int, said: dict[str, Any], parts: Sequence[memoryview] = ()) -> None:
    """Send a frame."""
    text = json.dumps(said).encode()
    line.sendall(_HEADER.pack(_MAGIC, kind, len(text), sum(part.nbytes for part in parts)) + text)
    for part in parts:
        line.sendall(part)


def read_frame(line: ssl.SSLSocket, most_data: int = 0, most_json: int = MOST_JSON) -> Frame:
    """Read the next frame; `EOFError` at the end of the line, `AccessError` for an invalid or too large one."""
    magic, kind, text, data = _HEADER.unpack(_read(line, _HEADER.size))
    if magic != _MAGIC or text > most_json or data > most_data:
        raise AccessError(
            "the other end of this line of data sends what is no frame",
            why=f"kind {kind}, {text} and {data} bytes, of {most_json} and {most_data} at most",
            mend="run the same version of this library at both ends",
        )
    try:
        said = json.loads(bytes(_read(line, text)))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise AccessError("the other end of this line of data sends what is no JSON object")
    return Frame(kind, said, _read(line, data))


def _read(line: ssl.SSLSocket, size: int) -> memoryview:
    """Read exactly `size` bytes."""
    whole = memoryview(np.empty(size, np.uint8).data)
    at = 0
    while at < size:
        found = line.recv_into(whole[at:], size - at)
        if not found:
            raise EOFError
        at += found
    return whole
