"""Whole frames out of a stream of bytes, for connections that know no messages."""

from __future__ import annotations

from collections.abc import Iterator

from whale_nebula.wire.frame import HEADER_BYTES, unpack


class Splitter:
    """Keeps the bytes of one half frame; nothing is reserved for bytes that have only been announced.

    >>> from whale_nebula.wire.frame import Flag, Header, Kind, pack
    >>> beat = pack(Header(Kind.BEAT, flags=Flag.LAST), 0)
    >>> splitter = Splitter()
    >>> [len(frame) for part in (beat[:9], beat[9:] + beat[:5]) for frame in splitter.split(part)]
    [136]
    """

    def __init__(self, *, sealed: bool = False) -> None:
        self._sealed = sealed
        self._buffer = bytearray()
        self._length = HEADER_BYTES

    def split(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """The frames that these bytes complete. A header that breaks a rule raises at once."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            count = min(self._length - len(self._buffer), view.nbytes)
            self._buffer += view[:count]
            view = view[count:]
            if len(self._buffer) == HEADER_BYTES:
                self._length += unpack(bytes(self._buffer), sealed=self._sealed)[0].length
            if len(self._buffer) == self._length:
                frame = bytes(self._buffer)
                self.forget()
                yield frame

    def forget(self) -> None:
        """Let the bytes of a half frame go."""
        self._buffer = bytearray()
        self._length = HEADER_BYTES
