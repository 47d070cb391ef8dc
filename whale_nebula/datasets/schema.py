"""The schema of a dataset: the published columns, with their element types and shapes; and its rows as bytes, in
frames between an owner's data service and its readers.

Deviating columns are refused: none is omitted or cast. Rows are sent as plain arrays in the order of the schema; texts
as their lengths, followed by their concatenated bytes. A frame is a header, JSON, and rows; headers are checked against
the expected sizes before memory is allocated.
"""

from __future__ import annotations

import json
import math
import ssl
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whale_nebula.errors import AccessError, InterfaceError
from whale_nebula.errors.text import list_names

STRING = "string"
DTYPES = (
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    STRING,
)  # fmt: skip
_LENGTH = np.dtype("<u4")
LONGEST_TEXT = 1 << 20

Columns = Mapping[str, Any]
"""Rows by columns: arrays whose first axis is the row; for texts, arrays of bytes objects."""


@dataclass(frozen=True, slots=True)
class Column:
    """A published column: its element type, and the shape of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """The bytes of a row; for a text, those of its length."""
        return math.prod(self.shape) * (_LENGTH.itemsize if self.dtype == STRING else np.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


Schema = tuple[Column, ...]


def check_columns(schema: Schema, columns: Columns, where: str) -> int:
    """Check that columns match the schema exactly; returns the number of rows."""
    known = {each.name for each in schema}
    if columns.keys() != known:
        more, fewer = sorted(columns.keys() - known), sorted(known - columns.keys())
        what = f"a column {more[0]!r} that is not in its schema" if more else f"no column {fewer[0]!r}"
        why = f"it has {list_names(sorted(columns))}, but the schema has {list_names([each.name for each in schema])}"
        raise _mismatch_error(f"the dataset has {what}", where, why)
    counts = set()
    for each in schema:
        array = columns[each.name]
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise _mismatch_error(f"column {each.name!r} is not an array of rows", where, f"the schema has {each}")
        found = STRING if array.dtype == object and all(isinstance(text, bytes) for text in array.flat) else ""
        found = found or array.dtype.name
        if found != each.dtype or array.shape[1:] != each.shape:
            why = f"a row of it is {found}{list(array.shape[1:])}, but the schema has {each}; nothing is cast"
            raise _mismatch_error(f"column {each.name!r} does not match its schema", where, why)
        if each.dtype == STRING and any(len(text) > LONGEST_TEXT for text in array.flat):
            raise _mismatch_error(
                f"a text of column {each.name!r} is too long", where, f"the limit is {LONGEST_TEXT} bytes"
            )
        counts.add(len(array))
    if len(counts) != 1:
        raise _mismatch_error("the columns have different numbers of rows", where, f"{sorted(counts)}")
    return int(counts.pop())


def _mismatch_error(what: str, where: str, why: str) -> InterfaceError:
    return InterfaceError(what, where=where, why=why, mend="fix the transformation, or publish a different schema")


# ---------------------------------------------------------------------- bytes
def encode_columns(schema: Schema, columns: Columns) -> list[memoryview]:
    """The bytes of rows that passed `check_columns`, as parts that are sent one after the other."""
    parts = []
    for each in schema:
        array = columns[each.name]
        if each.dtype == STRING:
            texts = list(array.flat)
            parts.append(np.array([len(text) for text in texts], _LENGTH).data.cast("B"))
            parts.append(memoryview(b"".join(texts)))
        elif array.size:
            plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            parts.append(plain.reshape(-1).view(np.uint8).data)
    return [part for part in parts if part.nbytes]


def count_bytes(schema: Schema, columns: Columns) -> int:
    """The number of bytes of these rows as encoded by `encode_columns`."""
    size = 0
    for each in schema:
        array = columns[each.name]
        size += len(array) * each.row_bytes
        size += sum(map(len, array.flat)) if each.dtype == STRING else 0
    return size


def find_max_bytes(schema: Schema, rows: int) -> int:
    """An upper bound of the bytes of this many rows."""
    texts = sum(math.prod(each.shape) for each in schema if each.dtype == STRING)
    return rows * (sum(each.row_bytes for each in schema) + texts * LONGEST_TEXT)


def decode_columns(schema: Schema, rows: int, data: memoryview) -> dict[str, Any]:
    """Decode rows; `ValueError` unless they match the schema and their number."""
    found: dict[str, Any] = {}
    at = 0
    for each in schema:
        count = rows * math.prod(each.shape)
        kind = _LENGTH if each.dtype == STRING else np.dtype(each.dtype).newbyteorder("<")
        values = np.frombuffer(data, kind, count, at) if count else np.empty(0, kind)
        at += values.nbytes
        if each.dtype == STRING:
            values, at = _split_texts(data, values, at)
        found[each.name] = values.reshape((rows, *each.shape))
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, but the rows have {at}")
    return found


def _split_texts(data: memoryview, lengths: Any, at: int) -> tuple[Any, int]:
    ends = at + np.cumsum(lengths, dtype=np.int64)
    if len(ends) and (int(ends[-1]) > len(data) or int(lengths.max()) > LONGEST_TEXT):
        raise ValueError("a text ends after the data")
    texts = np.empty(len(lengths), object)
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        texts[number] = bytes(data[end - length : end])
    return texts, int(ends[-1]) if len(ends) else at


# ---------------------------------------------------------------------- as JSON
def write_schema(schema: Schema) -> list[list[Any]]:
    """A schema as JSON values."""
    return [[each.name, each.dtype, list(each.shape)] for each in schema]


def read_schema(message: Any) -> Schema:
    """Parse the schema in a message; `ValueError` if it is invalid."""
    found = []
    for row in message if isinstance(message, Sequence) else ():
        name, dtype, shape = row
        is_valid = isinstance(name, str) and dtype in DTYPES and isinstance(shape, list) and len(shape) <= 8
        if not is_valid or not all(type(axis) is int and 0 < axis < 1 << 31 for axis in shape):
            raise ValueError("invalid column")
        found.append(Column(name, dtype, tuple(shape)))
    if not found or len({each.name for each in found}) != len(found):
        raise ValueError("no columns, or duplicate columns")
    return tuple(found)


# ---------------------------------------------------------------------- frames
HELLO, ASK, ANSWER, BATCH, END, REFUSED = range(1, 7)
MOST_JSON = 64 << 10
_HEADER = struct.Struct("!4sBII")
_MAGIC = b"NBD1"


class Frame(NamedTuple):
    """A frame: its kind, its JSON, and its bytes."""

    kind: int
    message: dict[str, Any]
    data: memoryview


def write_frame(
    connection: ssl.SSLSocket, kind: int, message: dict[str, Any], parts: Sequence[memoryview] = ()
) -> None:
    """Send a frame."""
    text = json.dumps(message).encode()
    connection.sendall(_HEADER.pack(_MAGIC, kind, len(text), sum(part.nbytes for part in parts)) + text)
    for part in parts:
        connection.sendall(part)


def read_frame(connection: ssl.SSLSocket, most_data: int = 0, most_json: int = MOST_JSON) -> Frame:
    """Read the next frame; `EOFError` at the end of the connection, `AccessError` for an invalid or too large frame."""
    magic, kind, text, data = _HEADER.unpack(_read(connection, _HEADER.size))
    if magic != _MAGIC or text > most_json or data > most_data:
        raise AccessError(
            "the other end of this data connection sent an invalid frame",
            why=f"kind {kind}, {text} and {data} bytes; the limits are {most_json} and {most_data}",
            mend="run the same version of this library at both ends",
        )
    try:
        message = json.loads(bytes(_read(connection, text)))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise AccessError("the other end of this data connection sent text that is not a JSON object")
    return Frame(kind, message, _read(connection, data))


def _read(connection: ssl.SSLSocket, size: int) -> memoryview:
    """Read exactly `size` bytes."""
    buffer = memoryview(np.empty(size, np.uint8).data)
    at = 0
    while at < size:
        found = connection.recv_into(buffer[at:], size - at)
        if not found:
            raise EOFError
        at += found
    return buffer
