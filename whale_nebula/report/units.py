"""Format seconds and bytes for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(1.5), duration(0.0123), duration(0.000456)
    ('1.500 s', '12.3 ms', '0.456 ms')
    """
    if seconds >= 0.1:
        return f"{seconds:.3f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.3g} ms"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(512), size(2048), size(5 * 2**20)
    ('512 B', '2.0 KiB', '5.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
