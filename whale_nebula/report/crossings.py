"""The boundaries of a step whose tensors a codec made small, as a table in lines."""

from __future__ import annotations

from collections.abc import Mapping

from whale_nebula.report.boundaries import BoundaryReport
from whale_nebula.report.text import duration, size

_HEADS = ("boundary", "codec", "raw -> payload", "on the wire", "error", "encode", "decode")
_NOTHING = "-"


def boundary_lines(boundaries: Mapping[str, BoundaryReport]) -> list[str]:
    r"""A line for each direction that is encoded, under a line of heads; none where nothing is.

    What another process does (to measure the error and to encode what is only taken in here) is a dash.

    >>> shown = {"b0 gpu->npu": BoundaryReport("int8", 4096, 1088, 1216, 1, 0.002, 0.001, 0.0093)}
    >>> print("\n".join(boundary_lines(shown)))
    boundary     codec  raw -> payload      on the wire  error   encode  decode
    b0 gpu->npu  int8   4.0 KiB -> 1.1 KiB  29.7 %       0.0093  2.0 ms  1.0 ms
    """
    rows = [_row(name, each) for name, each in encoded(boundaries).items()]
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (_HEADS, *rows)]


def encoded(boundaries: Mapping[str, BoundaryReport]) -> dict[str, BoundaryReport]:
    """The directions whose tensors a codec made small."""
    return {name: each for name, each in boundaries.items() if _small(each)}


def crossed(name: str, each: BoundaryReport) -> str:
    """A direction in a few words.

    >>> crossed("b0 gpu->npu", BoundaryReport("int8", 4096, 1088, 1216, 1, error=0.0093))
    'b0 gpu->npu as int8 1.2 KiB (29.7 %, off by 0.0093)'
    """
    off = "" if each.error is None else f", off by {each.error:.2g}"
    return f"{name} as {each.codec or _NOTHING} {size(each.wire_bytes)} ({100 * each.ratio:.3g} %{off})"


def _small(boundary: BoundaryReport) -> bool:
    return boundary.codec not in ("", "none") or boundary.payload_bytes != boundary.raw_bytes


def _row(name: str, each: BoundaryReport) -> tuple[str, ...]:
    return (
        name,
        each.codec or _NOTHING,
        f"{size(each.raw_bytes)} -> {size(each.payload_bytes)}",
        f"{100 * each.ratio:.3g} %",
        _NOTHING if each.error is None else f"{each.error:.2g}",
        duration(each.encode_seconds) if each.encode_seconds else _NOTHING,
        duration(each.decode_seconds) if each.decode_seconds else _NOTHING,
    )
