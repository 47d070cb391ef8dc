"""Search frames for a text: for its ids, in any number format, and for its words.

The patterns searched for in bytes are long enough to exclude chance: six bytes of ids or more, five of words. Shorter
words are searched for in control messages, which contain words.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import google_crc32c
import numpy as np

from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.wire.frame import HEADER_BYTES, Kind, unpack_header
from whale_nebula.wire.message import decode_message
from whale_nebula.wire.tensor import find_dtype

NEIGHBOUR_COUNTS = {"int16": 3, "int32": 2, "int64": 2, "float16": 3, "float32": 2, "float64": 2}
"""The types as which ids might be sent, and how many consecutive ids are searched for."""
MIN_PATTERN_BYTES, MIN_WORD_LETTERS = 5, 3
OWN_WORDS = frozenset({"the", "once"})
"""Words of control messages, which a text may contain as well."""
_RANDOM = re.compile(r"[A-Za-z0-9+/=]{24,}")
"""Certificates, keys and digests as text, which contain short words by chance."""


def record_frames() -> list[bytes]:
    """Record every frame that gRPC takes from this process from now on, before TLS."""
    taken: list[bytes] = []
    outgoing = Lane.yield_frames

    def record(lane: Lane) -> Iterator[bytes]:
        for frame in outgoing(lane):
            taken.append(frame)
            yield frame

    Lane.yield_frames = record  # type: ignore[method-assign]
    return taken


class Frame(NamedTuple):
    """A parsed frame: its kind, the dtype and dimensions of its tensor, whether a codec has encoded it, the fields of a
    control message, and the receiving worker, by its position among the names.
    """

    kind: Kind
    dtype: str
    dims: tuple[int, ...]
    is_encoded: bool
    message: dict[str, Any]
    destination: int = 0

    @classmethod
    def read(cls, data: bytes) -> Frame:
        header, _ = unpack_header(data[:HEADER_BYTES])
        found, kind = find_dtype(header.dtype), Kind(header.kind)
        message = decode_message(data[HEADER_BYTES:]) if kind == Kind.CONTROL else {}
        return cls(kind, "" if found is None else found.name, header.dims, header.encoded, message, header.destination)

    @property
    def description(self) -> str:
        """The kind, dtype and encoding as text.

        >>> Frame(Kind.BOUNDARY, "bool", (8, 16), True, {}).description
        'BOUNDARY bool coded'
        """
        return " ".join(
            [self.kind.name, *([self.dtype] if self.dtype else []), *(["coded"] if self.is_encoded else [])]
        )


@dataclass(frozen=True, slots=True)
class TextPatterns:
    """Byte patterns of a text with their descriptions, and short words, which are searched for only in messages."""

    patterns: dict[bytes, str]
    words: frozenset[str]

    @classmethod
    def of(cls, sentences: Sequence[str], rows: Iterable[Sequence[int]], first: int) -> TextPatterns:
        """The patterns of a text: of its sentences, and of ids from `first` on, which are those of words."""
        found = {pattern: f"ids as {name}" for row in rows for name, pattern in _encode_ids(row, first)}
        found |= {pattern: "words" for sentence in sentences for pattern in _split_sentence(sentence)}
        words = (word for sentence in sentences for word in _split_words(sentence))
        return cls(found, frozenset(word for word in words if len(word) >= MIN_WORD_LETTERS) - OWN_WORDS)

    def find_in(self, frame: bytes) -> list[str]:
        """The descriptions of patterns found in a frame, without its header, whose numbers may equal ids by chance."""
        message = Frame.read(frame).message
        description = json.dumps(message, ensure_ascii=False) if message else ""
        short = self.words & set(_split_words(_RANDOM.sub(" ", description)))
        found = [*self._patterns(frame[HEADER_BYTES:]), *self._patterns(description.encode())]
        return [*found, *(f"a word: {word}" for word in sorted(short))]

    def _patterns(self, data: bytes) -> list[str]:
        starts = {data[at : at + MIN_PATTERN_BYTES] for at in range(len(data) - MIN_PATTERN_BYTES + 1)}
        likely = [each for each in self.patterns if each[:MIN_PATTERN_BYTES] in starts]
        return [f"{self.patterns[each]}: {each!r}" for each in likely if each in data]


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of arrays and of all ranges of their rows, with the names of these."""

    names: dict[int, str]

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Checksums:
        """The checksums of each range of rows of each array."""
        found = {}
        for name, array in arrays.items():
            for start, end in itertools.combinations(range(len(array) + 1), 2):
                data = np.ascontiguousarray(array[start:end])
                found[google_crc32c.value(data.tobytes())] = f"{name}[{start}:{end}]"
        return cls(found)

    def find_in(self, frame: bytes) -> list[str]:
        """The arrays whose checksums a frame contains, as numbers in a message or as four bytes of a payload."""
        message = Frame.read(frame).message
        if message:
            description = set(re.findall(r"[0-9a-f]+", json.dumps(message).lower()))
            return sorted(
                name for crc, name in self.names.items() if description & {str(crc), f"{crc:x}", f"{crc:08x}"}
            )
        payload = frame[HEADER_BYTES:]
        there = {payload[at : at + 4] for at in range(len(payload) - 3)}
        orders: tuple[Literal["little", "big"], ...] = ("little", "big")
        return sorted(n for crc, n in self.names.items() if any(crc.to_bytes(4, order) in there for order in orders))


def _encode_ids(row: Sequence[int], first: int) -> Iterator[tuple[str, bytes]]:
    """The encodings of neighbouring ids in a row, as each type, and as text in a message."""
    for name, count in NEIGHBOUR_COUNTS.items():
        for start in range(len(row) - count + 1):
            some = row[start : start + count]
            if min(some) >= first:
                yield name, np.asarray(some, np.dtype(name).newbyteorder("<")).tobytes()
    for pair in itertools.pairwise(row):
        if min(pair) >= first:
            yield from (("text", mark.join(map(str, pair)).encode()) for mark in (",", ", ", " "))


def _split_sentence(sentence: str) -> set[bytes]:
    """The long words and pairs of neighbouring words of a sentence, in several cases of letters."""
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(sentence.split())]
    parts = {each.encode() for part in (*_split_words(sentence), *pairs) for each in (part, part.lower(), part.title())}
    return {part for part in parts if len(part) >= MIN_PATTERN_BYTES}


def _split_words(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[^\W\d_]+", text)]
