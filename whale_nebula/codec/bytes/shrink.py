"""A general compressor behind a probe: it is used only where it is seen to help, and never trusted to be small."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from whale_nebula.errors import ConfigError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

SAMPLE_BYTES = 64 << 10
WORTH = 0.97  # of the bytes: what leaves more than that is not worth its time


class Press(Protocol):
    """A compressor of bytes."""

    def press(self, data: Bytes) -> bytes:
        """The bytes, compressed."""

    def open(self, data: Bytes, size: int) -> bytes | None:
        """The bytes before; None where these are no compressed bytes, or not of so many. It allocates no more."""


def shrink(data: Bytes, press: Press) -> Bytes | None:
    """The bytes compressed, or None where that does not make them smaller by three hundredths.

    A sample out of the middle is tried first, so that what does not compress costs little.
    """
    if data.size > SAMPLE_BYTES:
        start = (data.size - SAMPLE_BYTES) // 2
        if _pressed(data[start : start + SAMPLE_BYTES], press) is None:
            return None
    return _pressed(data, press)


def unshrink(data: Bytes, size: int, press: Press) -> Bytes:
    """The bytes before, of which the caller knows how many there are."""
    found = press.open(data, size)
    if found is None or len(found) != size:
        raise RemoteProtocolError(f"{data.size} compressed bytes came that are not {size} bytes")
    return np.frombuffer(found, np.uint8)


def _pressed(data: Bytes, press: Press) -> Bytes | None:
    made = press.press(data)
    return np.frombuffer(made, np.uint8) if len(made) <= WORTH * data.size and data.size else None


class Zstd:
    """Zstandard at its fastest level; it needs a package that is installed only where it is asked for."""

    def __init__(self) -> None:
        self._package = _package()

    def press(self, data: Bytes) -> bytes:
        """The bytes, compressed: a frame that says how many they were."""
        made: bytes = self._package.ZstdCompressor(level=1).compress(data.data)
        return made

    def open(self, data: Bytes, size: int) -> bytes | None:
        """The bytes before. A frame that announces another size is not opened: the package would allocate that."""
        try:
            if self._package.frame_content_size(data.data) != size:
                return None
            found: bytes = self._package.ZstdDecompressor().decompress(
                data.data, max_output_size=size, allow_extra_data=False
            )
        except self._package.ZstdError:
            return None
        return found


def _package() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ConfigError(
            "zstd was asked for, and its package is not installed",
            why="whale_nebula needs 'zstandard' for that alone, so it is an extra",
            mend="pip install 'whale-nebula[zstd]' on every host",
        ) from None
    return zstandard
