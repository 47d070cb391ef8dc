"""The hash chain of a log: lines of canonical JSON, each with the digest of the line before.

A value cannot forge a line: text is ASCII with everything else escaped, newlines too. Pure: bytes in, records out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Record = dict[str, Any]

GENESIS, RECOVERED, HEAD, END = "genesis", "recovered", "head", "end"


class Link(NamedTuple):
    """Where a chain has come to: the number of its last record and the SHA-256 of that line."""

    seq: int
    digest: str


START = Link(-1, "0" * 64)


class BrokenError(Exception):
    """A line that does not continue the chain; its text says why."""


def digest(line: bytes) -> str:
    """The digest of a line, its newline left out."""
    return hashlib.sha256(line).hexdigest()


def canonical(record: Mapping[str, Any]) -> bytes:
    r"""The one way to write a record.

    >>> canonical({"b": "x\ny", "a": 1})
    b'{"a":1,"b":"x\\ny"}'
    """
    return json.dumps(record, sort_keys=True, allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode()


def forge(before: Link, said: Mapping[str, Any]) -> tuple[bytes, Link]:
    """The next line of a chain, and where the chain has come to with it."""
    line = canonical({**said, "seq": before.seq + 1, "prev": before.digest})
    return line, Link(before.seq + 1, digest(line))


def follow(line: bytes, before: Link) -> tuple[Record, Link]:
    """The record in a line, if it is the next of the chain."""
    record = parse(line)
    if record is None:
        raise BrokenError("this is no record: not canonical JSON, or torn")
    if type(record.get("seq")) is not int or record["seq"] != before.seq + 1:
        raise BrokenError(f"the next record says it is number {record.get('seq')!r:.20}: one is missing or was moved")
    if record.get("prev") != before.digest:
        raise BrokenError("it does not follow from the record before: one of the two was changed")
    return record, Link(before.seq + 1, digest(line))


def parse(line: bytes) -> Record | None:
    """The record in a line; None unless it is written in the one way."""
    try:
        record = json.loads(line)
        written = canonical(record) if isinstance(record, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None
    return record if written == line else None


def is_torn_record(line: bytes) -> bool:
    r"""Whether these bytes are what a crash leaves of one record: its beginning, then NULs that a disk put there.

    >>> [is_torn_record(line) for line in (b'{"act', b'{"act\0\0', b'["action"', b"", b'{"action":"end"}')]
    [True, True, False, False, False]
    """
    text = line.rstrip(b"\0")
    begins = b'{"'.startswith(text[:2]) and all(32 <= byte < 127 for byte in text)
    return bool(line) and begins and parse(line) is None


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines in these bytes, and what stands after the last newline."""
    *lines, rest = data.split(b"\n")
    return lines, rest


def follow_all(lines: Iterable[bytes], start: Link) -> Link:
    """Where a chain has come to with these lines; raises `BrokenError` if one of them is not its next record."""
    for line in lines:
        _, start = follow(line, start)
    return start
