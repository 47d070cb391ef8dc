"""The hash chain of a log: lines of canonical JSON, each with the digest of the line before.

A value cannot forge a line: records are ASCII, and all other characters and newlines are escaped. All functions are
pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Record = dict[str, Any]

GENESIS, RECOVERED, HEAD, END = "genesis", "recovered", "head", "end"


class Link(NamedTuple):
    """A position in a chain: the number of its last record and the SHA-256 of that line."""

    seq: int
    digest: str


START = Link(-1, "0" * 64)


class BrokenChainError(Exception):
    """A line that does not continue the chain; its text is the reason."""


def digest(line: bytes) -> str:
    """The digest of a line without its newline."""
    return hashlib.sha256(line).hexdigest()


def encode_canonical(record: Mapping[str, Any]) -> bytes:
    r"""Encode a record in its canonical form.

    >>> encode_canonical({"b": "x\ny", "a": 1})
    b'{"a":1,"b":"x\\ny"}'
    """
    return json.dumps(record, sort_keys=True, allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode()


def make_line(before: Link, fields: Mapping[str, Any]) -> tuple[bytes, Link]:
    """The next line of a chain, and the link after it."""
    line = encode_canonical({**fields, "seq": before.seq + 1, "prev": before.digest})
    return line, Link(before.seq + 1, digest(line))


def verify_line(line: bytes, before: Link) -> tuple[Record, Link]:
    """Parse a line as the next record of the chain."""
    record = parse_line(line)
    if record is None:
        raise BrokenChainError("the line is not a complete record in canonical JSON")
    if type(record.get("seq")) is not int or record["seq"] != before.seq + 1:
        raise BrokenChainError(
            f"the next record has number {record.get('seq')!r:.20}: a record is missing or was moved"
        )
    if record.get("prev") != before.digest:
        raise BrokenChainError("its digest of the previous record is wrong: one of the two records was modified")
    return record, Link(before.seq + 1, digest(line))


def parse_line(line: bytes) -> Record | None:
    """Parse a line; None unless it is canonical."""
    try:
        record = json.loads(line)
        written = encode_canonical(record) if isinstance(record, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None
    return record if written == line else None


def is_torn_record(line: bytes) -> bool:
    r"""Whether these bytes are what a crash leaves of one record: its beginning, then NULs.

    >>> [is_torn_record(line) for line in (b'{"act', b'{"act\0\0', b'["action"', b"", b'{"action":"end"}')]
    [True, True, False, False, False]
    """
    text = line.rstrip(b"\0")
    begins = b'{"'.startswith(text[:2]) and all(32 <= byte < 127 for byte in text)
    return bool(line) and begins and parse_line(line) is None


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Split bytes into complete lines and the rest after the last newline."""
    *lines, rest = data.split(b"\n")
    return lines, rest


def verify_lines(lines: Iterable[bytes], start: Link) -> Link:
    """The link after these lines; raises `BrokenChainError` if one of them is not the next record."""
    for line in lines:
        _, start = verify_line(line, start)
    return start
