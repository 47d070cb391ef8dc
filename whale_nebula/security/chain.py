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


def is_torn_recovery(line: bytes) -> bool:
    """Whether this is a torn `recovered` record: of a writer that crashed when it went on after a crash."""
    text, begin = line.rstrip(b"\0"), b'{"action":"recovered",'
    return is_torn_record(line) and (text.startswith(begin) or begin.startswith(text))


class Follower:
    """Follows a chain line by line, and knows what a crash left.

    A crash tears one line: the last. The writer that goes on does not remove it: it writes a record `recovered` after
    it, with the digest of what was torn. So one line that may be torn is set aside until that record comes; before
    it may stand torn `recovered` records, and nothing else. `torn` counts the crashes, `torn_bytes` what was set aside.
    """

    def __init__(self, start: Link = START) -> None:
        self.link = start
        self.torn = self.torn_bytes = 0
        self.aside: list[bytes] = []
        self._why = ""

    def next(self, line: bytes) -> Record | None:
        """The record of the next line; None for one that is set aside. Raises `BrokenError` once that is certain."""
        try:
            record, link = follow(line, self.link)
        except BrokenError as error:
            self._why = self._why or str(error)
            if not (is_torn_recovery(line) if self.aside else is_torn_record(line)):
                raise BrokenError(self._why) from None
            self.aside.append(line)
            return None
        if self.aside:
            torn = b"\n".join(self.aside)
            if record.get("action") != RECOVERED or record.get("torn") != digest(torn):
                raise BrokenError(self._why)
            self.torn_bytes += len(torn)
            self.aside, self._why = [], ""
            self.torn += 1
        self.link = link
        return record

    def end(self) -> None:
        """The file has ended: what is still aside is broken."""
        if self.aside:
            raise BrokenError(self._why)


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines in these bytes, and what stands after the last newline."""
    *lines, rest = data.split(b"\n")
    return lines, rest


def tail_of(lines: Iterable[bytes], start: Link) -> tuple[Link, list[bytes]]:
    """Where a chain has come to, and the lines after it that a crash left; raises `BrokenError` for other faults."""
    follower = Follower(start)
    for line in lines:
        follower.next(line)
    return follower.link, follower.aside
