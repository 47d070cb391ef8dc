"""Assemble tensors from chunks, checked against what the plan allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import Flag, Header
from whale_nebula.wire.tensor import Bytes, array_from, dtype_of, raw_bytes

WHOLE_LIMIT = 1 << 30
_NO_MORE = 2**32 - 1  # the largest size that a header has room for: a bound that is no bound


class Bound(NamedTuple):
    """What the plan allows a tensor to be: its element type and, for every axis, the largest size.

    `codecs` are those that may have encoded it (none, unless the plan says so), and `extra` is how many bytes more
    than the tensor itself what they made may have: heads of what was packed, and rows that did not get smaller.
    `due` is how many bytes of it this step accounts for: what lies here beyond that holds its sender.
    """

    dtype: str
    most: tuple[int, ...]
    codecs: frozenset[int] = frozenset()
    extra: int = 0
    due: float = math.inf

    @property
    def said(self) -> str:
        """The sizes, for a message.

        >>> Bound("float16", (2**32 - 1, 8)).said
        '[any, 8]'
        """
        return f"[{', '.join('any' if size >= _NO_MORE else str(size) for size in self.most)}]"

    def admits(self, dtype: str, dims: tuple[int, ...]) -> bool:
        """Whether such a tensor keeps within the bound."""
        fits = len(dims) == len(self.most) and all(size <= most for size, most in zip(dims, self.most, strict=True))
        return fits and dtype == self.dtype

    def admits_encoded(self, codec: int, size: int, raw: int) -> bool:
        """Whether this codec may have made so many bytes of a tensor of `raw` bytes."""
        return codec in self.codecs and size <= raw + self.extra


class TensorArrived(NamedTuple):
    """A whole tensor; the header is that of its last frame. Of one that is encoded, `array` are the codec's bytes."""

    header: Header
    array: npt.NDArray[Any]


Expect: TypeAlias = Callable[[Header], Bound | None]


class Assembly:
    """Puts the tensors of one direction together: one after the other, each from its first chunk to its last.

    `expect` is asked before anything is allocated. It gives for a header what the plan allows, raises
    `RemoteProtocolError` for a tensor that nobody expects, or gives None: then, as without `expect`, a tensor
    may have up to `limit` bytes, and one that is encoded so many before and after. What `place` refuses changes
    nothing, and a chunk that was given its place but did not come whole may be placed again.
    """

    def __init__(self, expect: Expect | None = None, *, limit: int = WHOLE_LIMIT) -> None:
        self._expect = expect
        self._limit = limit
        self._tensor: tuple[Header, Bytes] | None = None  # the tensor whose chunks are coming in
        self._received = 0  # of that tensor, in bytes

    def place(self, header: Header) -> Bytes:
        """Where the chunk of this (checked) header belongs."""
        if self._tensor is None and header.offset == 0:
            self._tensor, self._received = (_common(header), self._allocate(header)), 0
        if self._tensor is None or header.offset != self._received or _common(header) != self._tensor[0]:
            raise RemoteProtocolError("a chunk does not continue the tensor that is being received")
        return self._tensor[1][header.offset : header.offset + header.length]

    def finish_chunk(self, header: Header) -> list[TensorArrived]:
        """Say that the chunk of this header lies in its place; gives the tensor that it completes."""
        self._received = header.offset + header.length
        if not header.last or self._tensor is None:
            return []
        data, self._tensor = self._tensor[1], None
        if header.encoded:
            return [TensorArrived(header, data)]
        if header.dtype == 1 and data.size and data.max() > 1:
            raise RemoteProtocolError("a bool that is neither 0 nor 1")
        return [TensorArrived(header, array_from(data, header.dtype, header.dims))]

    def _allocate(self, header: Header) -> Bytes:
        raw = raw_bytes(header.dtype, header.dims)
        if self._expect is not None and (bound := self._expect(header)) is not None:
            dtype = dtype_of(header.dtype)
            name = dtype.name if dtype else "?"
            if not bound.admits(name, header.dims):
                wanted = f"{bound.dtype}, at most {bound.said}"
                raise RemoteProtocolError(f"{name}{list(header.dims)} came where the plan expects {wanted}")
            if header.encoded and not bound.admits_encoded(header.codec, header.whole, raw):
                allowed = f"codecs {sorted(bound.codecs)} and {bound.extra} bytes more" if bound.codecs else "no codec"
                raise RemoteProtocolError(
                    f"{header.whole} bytes of codec {header.codec} came for a tensor of {raw}, "
                    f"where the plan allows {allowed}"
                )
        if (size := max(header.whole, raw)) > self._limit:
            raise RemoteProtocolError(f"a tensor of {size} bytes is above this link's limit of {self._limit}")
        try:
            return np.empty(header.whole, np.uint8)
        except MemoryError:
            raise RemoteProtocolError(f"no memory for a tensor of {header.whole} bytes") from None


def _common(header: Header) -> Header:
    """What is the same in all frames of one tensor."""
    return header._replace(sequence=0, ack=0, offset=0, length=0, flags=header.flags & ~Flag.LAST)


class MessageArrived(NamedTuple):
    """A control message."""

    header: Header
    message: dict[str, Any]
