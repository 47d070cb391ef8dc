"""A matrix in so many bytes, and not one more: rows as whole multiples of their scales, by how often these come.

A row's numbers are divided by its norm, and by a distance that is the same for all rows; they go to the nearest whole
numbers, and these are packed by their frequencies (`huffman`). The distance is the finest with which all of it fits.
So each row loses about the same share of its norm, where numbers are small nothing but a part of a bit is spent, and
how many bytes it takes is known before.

What crosses begins with a scale, and for each row eighths of an octave that its own lies below that. A row that holds
a NaN or an infinity comes as NaN. What comes is a whole number times a product of two single numbers: the same bytes
become the same tensor everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.bytes import huffman
from whale_nebula.codec.coded import HEAD, LARGEST, LOOKED_AT
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

Numbers = npt.NDArray[np.float32]

_OCTAVE, _LOWEST, _BROKEN = 8, 240, 255
_EIGHTHS = np.array([1.0, 0.91700404, 0.84089642, 0.77110541, 0.70710678, 0.64841978, 0.59460356, 0.54525387], "f4")
"""Powers of two from 0 down to -7/8, written out: no two libraries need agree on a logarithm."""
_SMALLEST, _LARGEST = 2.0**-100, np.float32(LARGEST)
_FULL, _NEARLY_FULL = 0.985, 0.97  # of the bytes: what is left is not worth another look, at few rows or at all
_LOOKS, _FEW_LOOKS, _FINEST = 9, 4, 2.0**-9
_CODES = 400  # bytes that the codes themselves take, about, however many numbers follow
_MOST_LONGER = 2.0  # how much longer a gradient may be made so that its own share of it is whole


class _Rows(NamedTuple):
    """A matrix by rows of one length: `single` are its numbers so divided, `scales` by what, relative to `top`."""

    single: Numbers
    scales: Numbers
    codes: npt.NDArray[np.uint8]
    top: float


class _Fitting(NamedTuple):
    """What was tried: a distance, the whole numbers, and their bytes."""

    distance: float
    integers: huffman.Integers
    packed: Bytes


def quantise(x: Numbers, size: int, *, whole: bool) -> Bytes:
    """The matrix in `size` bytes. With `whole` it comes a little longer: such that the product with what was sent is
    what that has with itself.

    >>> x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    >>> again = dequantise(quantise(x, 1024, whole=False), 64, 64)
    >>> bool(np.linalg.norm(x - again) < 0.4 * np.linalg.norm(x))
    True
    """
    rows = _rows(x)
    scales = huffman.deflated(rows.codes.tobytes())
    room = size - HEAD - len(scales)
    distance, integers, packed = _finest(rows.single, room)
    scale = np.float32(min(rows.top * distance * _longer(rows, integers, distance, whole), float(_LARGEST)))
    head = scale.tobytes() + len(scales).to_bytes(4, "little")
    made = np.zeros(size, np.uint8)
    body = np.frombuffer(head + scales + packed.tobytes(), np.uint8)
    made[: body.size] = body
    return made


def dequantise(data: Bytes, rows: int, columns: int) -> Numbers:
    """The matrix again.

    >>> dequantise(quantise(np.zeros((2, 4), "float32"), 99, whole=True), 2, 4).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    if data.size < HEAD:
        raise RemoteProtocolError(f"{data.size} bytes of packed numbers came, which is less than their head")
    scale = np.frombuffer(data[:4].tobytes(), "<f4")[0]
    size = int.from_bytes(data[4:HEAD].tobytes(), "little")
    if data.size < HEAD + size or not 0 <= scale < np.inf:
        raise RemoteProtocolError("packed numbers begin with bytes that mean nothing")
    codes = np.frombuffer(huffman.opened(data[HEAD : HEAD + size].tobytes(), rows), np.uint8)
    integers, used = huffman.unpack(data[HEAD + size :], rows, columns)
    if data[HEAD + size + used :].any():
        raise RemoteProtocolError("packed numbers go on behind their end")
    with np.errstate(over="ignore", under="ignore"):
        made = np.clip(integers * (_powers(codes) * scale)[:, None], -_LARGEST, _LARGEST)
    made[codes == _BROKEN] = np.nan
    return made


def _rows(x: Numbers) -> _Rows:
    """Each row by a scale that is near its norm, as it is sent."""
    with np.errstate(all="ignore"):
        peaks = np.abs(x).max(axis=1, initial=0)
        safe = np.where((peaks > 0) & np.isfinite(peaks), peaks, 1)[:, None]
        norms = peaks * np.sqrt(np.square(x / safe).mean(axis=1))
    broken = np.logical_not(np.isfinite(x).all(axis=1))
    norms = np.where(broken, 0, norms).astype(np.float64)
    top = float(norms.max(initial=0))
    if top < _SMALLEST:
        return _Rows(np.zeros_like(x), np.zeros(len(x), np.float32), _codes(np.zeros(len(x)), broken), 0.0)
    below = np.round(-_OCTAVE * np.log2(np.maximum(norms / top, 2.0**-40)))
    codes = _codes(np.minimum(below, _LOWEST), broken)
    scales = _powers(codes)
    single = np.where(broken[:, None], 0, x) / np.float32(top) / scales[:, None]
    return _Rows(single.astype(np.float32), scales, codes, top)


def _codes(below: npt.NDArray[np.float64], broken: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    return np.where(broken, _BROKEN, below).astype(np.uint8)


def _powers(codes: npt.NDArray[np.uint8]) -> Numbers:
    """Two to the power of so many eighths below zero."""
    return np.ldexp(_EIGHTHS[codes % _OCTAVE], -(codes // _OCTAVE).astype(np.int32))


def _finest(single: Numbers, room: int) -> _Fitting:
    """The finest distance with which the whole numbers fit: found on some rows, if there are many, and made better on
    all.
    """
    some = single[:: max(1, single.size // LOOKED_AT)]
    finest = max(_FINEST, float(np.abs(single).max(initial=0)) / huffman.MOST)
    first = max(finest, 2.0 ** float(np.clip(2.05 - 8 * room / max(1, single.size), np.log2(_FINEST), 5)))
    if len(some) < len(single):
        share = len(some) / len(single)
        found = _searched(some, room * share + _CODES * (1 - share), first, finest=finest, looks=_LOOKS, full=_FULL)
        tried = _searched(single, room, found.distance, finest=finest, looks=_FEW_LOOKS, full=_NEARLY_FULL)
    else:
        tried = _searched(single, room, first, finest=finest, looks=_LOOKS, full=_FULL)
    while tried.packed.size > room:
        tried = _fitting(single, 1.5 * tried.distance)
    return tried


def _searched(single: Numbers, room: float, distance: float, *, finest: float, looks: int, full: float) -> _Fitting:
    """The finest that was found to fit; where none was, the coarsest that was looked at.

    An octave more takes up to a bit a number less; so much is known, and where it fits is enclosed from both sides.
    """
    fits: _Fitting | None = None
    fails: float | None = None
    for _ in range(looks):
        tried = _fitting(single, distance)
        size = tried.packed.size
        if size <= room:
            fits = tried
            if size >= full * room or distance <= finest:
                break
        else:
            fails = distance
        step = 8 * (size - room) / max(1, single.size)
        towards = 2.0 ** float(np.clip(1.2 * step + np.sign(step) / 50, -2, 2))
        distance = float(np.sqrt(fits.distance * fails)) if fits and fails else max(finest, distance * towards)
    return fits or tried


def _fitting(single: Numbers, distance: float) -> _Fitting:
    integers = _whole_numbers(single, distance)
    return _Fitting(distance, integers, huffman.pack(integers))


def _whole_numbers(single: Numbers, distance: float) -> huffman.Integers:
    return np.clip(np.rint(single / np.float32(distance)), -huffman.MOST, huffman.MOST).astype(np.int16)


def _longer(rows: _Rows, integers: huffman.Integers, distance: float, whole: bool) -> float:
    """What to multiply with: the least error, or the whole of its own share."""
    again = integers.astype(np.float32)
    product = _product(rows, rows.single, again)
    if product <= 0:
        return 1.0
    itself = _product(rows, rows.single, rows.single) if whole else product
    best = itself / (product if whole else _product(rows, again, again))
    return float(np.clip(best / distance, 1 / _MOST_LONGER, _MOST_LONGER))


def _product(rows: _Rows, a: Numbers, b: Numbers) -> float:
    """Of two matrices of rows of one length, as if each row were as long as it was."""
    weights = np.square(rows.scales.astype(np.float64))
    return float(np.einsum("ij,ij->i", a, b).astype(np.float64) @ weights)
