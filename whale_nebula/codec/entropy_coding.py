"""An entropy-coded precision with a fixed average number of bits per number; its size in bytes is fixed beforehand."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.blocks import restore, rows_and_columns
from whale_nebula.codec.objects import Cost, Precision
from whale_nebula.codec.packing import Dims, Part
from whale_nebula.errors import OptionError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

MAX_BITS = 6
LARGEST = 3.38e38  # also in the range of bfloat16
SAMPLED_NUMBERS = 1 << 15  # numbers in the sample on which the finest step is searched
HEAD_BYTES = 8  # bytes: the scale, and the size of the rows' scales
MAX_GROUPS = 8  # maximum number of groups of adjacent columns, each with its own code
_LEAST_GROUP_BYTES = 16  # minimum bytes of a group
_SEARCH_SECONDS = 90e-9  # seconds for each number of the sample


@dataclass(frozen=True)
class Coded(Precision):
    """Entropy-coded integers with a budget of `bits` a number in total (exceeded only for short rows). The quantisation
    step of each row follows from the budget and the numbers; with skewed frequencies the error is less than that of
    plain integers of the same number of bits. A gradient is not rounded stochastically, but scaled so that its
    projection on itself is unbiased.

    After `Axes` most frequencies are very skewed: the error of two bits a number is that of three to four otherwise.

    >>> str(Coded(2.3)), sum(part.nbytes for part in Coded(2).parts((64, 128), "float32"))
    ('coded(2.3)', 2048)
    """

    name = "coded"
    nearest = Cost(20.0, 8.5)
    bits: float

    def __post_init__(self) -> None:
        number = isinstance(self.bits, int | float) and not isinstance(self.bits, bool)
        if not number or not 0 < self.bits <= MAX_BITS:
            raise OptionError(
                f"Coded({self.bits!r}) is out of range",
                why=f"bits per number must be above 0 and at most {MAX_BITS}",
                mend="nb.codec.Coded(2.3)",
            )

    def cost(self, count: int, *, back: bool = False) -> Cost | None:
        """Costs of quantising, with the search for the finest step."""
        found = super().cost(count, back=back)
        return None if found is None else found + Cost(_SEARCH_SECONDS * min(count, SAMPLED_NUMBERS))

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """One array of bytes: at least the size for zeros; its end may be unused."""
        rows, columns = rows_and_columns(dims)
        if not rows or not columns:
            return (Part("uint8", (0,)),)
        return (
            Part(
                "uint8",
                (max(ceil(rows * columns * self.bits / 8), HEAD_BYTES + 2 * rows + MAX_GROUPS * _LEAST_GROUP_BYTES),),
            ),
        )

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """Quantise with the least error; with a key so that the projection on the tensor itself is unbiased."""
        dims = tuple(int(size) for size in x.shape)
        (size,) = self.parts(dims, x.dtype.name)[0].dims
        if not size:
            return (np.empty(0, np.uint8),)
        wide = np.asarray(x)
        if wide.dtype == np.float64:  # larger numbers saturate at float32's largest; infinities are kept
            wide = np.where(np.isfinite(wide), np.clip(wide, -LARGEST, LARGEST), wide)
        matrix = wide.astype(np.float32).reshape(rows_and_columns(dims))
        return (quantise(matrix, size, unbiased=key is not None),)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Integers times scales, saturating in the tensor's type."""
        data = np.asarray(parts[0])
        made = dequantise(data, *rows_and_columns(dims)) if data.size else data.astype(np.float32)
        return restore(made.reshape(dims), dtype)


Integers = npt.NDArray[np.int16]

COLUMN_MULTIPLE, SYMBOL_LENGTHS = 8, (4, 2, 1)
GROUP_HEAD_BYTES = 6  # bytes before a group
MAX_INTEGER = 32767
_MAX_BYTE_INTEGER, _SYMBOLS = 127, 256
_LEAST_GROUP_COUNT = 2048  # minimum count of numbers for their own code
_FULL_SEARCH_COUNT = 1 << 15  # numbers of a group, up to which all symbol sizes are tried


def group_width(rows: int, columns: int) -> int:
    """The number of adjacent columns in a group: a multiple of a symbol, at most eight groups, fewer where another code
    table would cost more than it saves.

    >>> [group_width(400, columns) for columns in (1, 64, 128, 768)], group_width(32, 128)
    ([8, 8, 16, 96], 64)
    """
    groups = min(MAX_GROUPS, max(1, rows * columns // _LEAST_GROUP_COUNT))
    return COLUMN_MULTIPLE * -(-columns // (COLUMN_MULTIPLE * groups))


def pack(numbers: Integers) -> Bytes:
    """Compress the integers of a matrix.

    >>> pack(np.zeros((1000, 64), "int16")).size, pack(np.eye(64, dtype="int16")).size < 64 * 64 // 8
    (48, True)
    """
    found: list[bytes] = []
    if not numbers.size:
        return np.empty(0, np.uint8)
    for group in _split_groups(numbers):
        length, most, made = _pack_group(group)
        found += [bytes([length, most]), len(made).to_bytes(4, "little"), made]
    return np.frombuffer(b"".join(found), np.uint8)


def unpack(data: Bytes, rows: int, columns: int) -> tuple[Integers, int]:
    """Decompress the integers of a matrix of these sizes; returns them, and the number of bytes read.

    >>> numbers = np.array([[0, -3, 900], [1, 0, 0]], "int16")
    >>> again, size = unpack(pack(numbers), 2, 3)
    >>> bool((again == numbers).all()), size == pack(numbers).size
    (True, True)
    """
    if not rows or not columns:
        return np.empty((rows, columns), np.int16), 0
    width, place = group_width(rows, columns), 0
    made = np.empty((rows, -(-columns // width) * width), np.int16)
    for start in range(0, columns, width):
        head = data[place : place + GROUP_HEAD_BYTES]
        if head.size < GROUP_HEAD_BYTES:
            raise RemoteProtocolError("packed numbers are truncated before their last group")
        size = int.from_bytes(head[2:].tobytes(), "little")
        body = data[place + GROUP_HEAD_BYTES : place + GROUP_HEAD_BYTES + size]
        made[:, start : start + width] = _unpack_group(int(head[0]), int(head[1]), body, size, rows, width)
        place += GROUP_HEAD_BYTES + size
    return made[:, :columns], place


def deflate(data: bytes, *, runs: bool = False) -> bytes:
    """Compress bytes by the frequencies of their values; with `runs` also by runs of equal ones, if that is smaller.

    >>> inflate(deflate(b"aaab"), 4), len(deflate(bytes(900), runs=True)) < len(deflate(bytes(900)))
    (b'aaab', True)
    """
    strategies = (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE) if runs else (zlib.Z_HUFFMAN_ONLY,)
    return min((_deflate(data, strategy) for strategy in strategies), key=len)


def _deflate(data: bytes, strategy: int) -> bytes:
    made = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    return made.compress(data) + made.flush()


def inflate(data: bytes, size: int) -> bytes:
    """Decompress to exactly `size` bytes; no more are ever decompressed."""
    stream = zlib.decompressobj(-15)
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error:
        raise RemoteProtocolError("packed numbers cannot be decompressed") from None
    if len(found) != size or not stream.eof or stream.unused_data or stream.unconsumed_tail:
        raise RemoteProtocolError(f"packed numbers do not decompress to the expected {size} bytes")
    return found


def _split_groups(numbers: Integers) -> Iterator[Integers]:
    """Split a matrix into groups, padded with zeros."""
    width = group_width(*numbers.shape)
    for start in range(0, numbers.shape[1], width):
        group = numbers[:, start : start + width]
        yield group if group.shape[1] == width else np.pad(group, [(0, 0), (0, width - group.shape[1])])


def _pack_group(group: Integers) -> tuple[int, int, bytes]:
    """Numbers per symbol, largest magnitude, and bytes of a group; no bytes for zeros."""
    most = max(int(group.max(initial=0)), -int(group.min(initial=0)))
    if not most:
        return 1, 0, b""
    if most > _MAX_BYTE_INTEGER:
        return 0, 0, deflate(np.ascontiguousarray(group, "<i2").view(np.uint8).reshape(-1, 2).T.tobytes())
    lengths = [length for length in SYMBOL_LENGTHS if (2 * most + 1) ** length <= _SYMBOLS]
    tried = lengths if group.size <= _FULL_SEARCH_COUNT else lengths[:1]
    made = ((each, most, deflate(_to_symbols(group, each, most), runs=most == 1)) for each in tried)
    return min(made, key=lambda one: len(one[2]))


def _to_symbols(group: Integers, length: int, most: int) -> bytes:
    digits = (group + most).astype(np.uint8).reshape(-1, length)
    made = digits[:, 0].copy()
    for place in range(1, length):
        made *= np.uint8(2 * most + 1)
        made += digits[:, place]
    return made.tobytes()


def _unpack_group(length: int, most: int, body: Bytes, size: int, rows: int, width: int) -> Any:
    levels = 2 * most + 1
    known = length in (0, *SYMBOL_LENGTHS) and levels ** max(length, 1) <= _SYMBOLS
    if body.size != size or not known:
        raise RemoteProtocolError("a group of packed numbers has an invalid header")
    if length == 1 and most == size == 0:
        return 0
    if length == 0:
        halves = np.frombuffer(inflate(body.tobytes(), 2 * rows * width), np.uint8).reshape(2, -1)
        return np.ascontiguousarray(halves.T).view("<i2").reshape(rows, width)
    symbols = np.frombuffer(inflate(body.tobytes(), rows * width // length), np.uint8)
    if int(symbols.max(initial=0)) >= levels**length:
        raise RemoteProtocolError("a packed number exceeds its group's maximum")
    return _list_symbol_digits(length, most)[symbols].reshape(rows, width)


def _list_symbol_digits(length: int, most: int) -> Integers:
    """The numbers that each symbol represents."""
    levels = 2 * most + 1
    symbols = np.arange(levels**length)[:, None]
    return (symbols // levels ** np.arange(length - 1, -1, -1) % levels - most).astype(np.int16)


Numbers = npt.NDArray[np.float32]

_OCTAVE, _LOWEST, _NONFINITE = 8, 240, 255
_EIGHTHS = np.array([1.0, 0.91700404, 0.84089642, 0.77110541, 0.70710678, 0.64841978, 0.59460356, 0.54525387], "f4")
"""Powers of two from 0 down to -7/8, as literals: they do not depend on a library's rounding."""
_SMALLEST, _LARGEST = 2.0**-100, np.float32(LARGEST)
_FULL, _NEARLY_FULL = 0.985, 0.97  # shares of the bytes at which the search ends: on the sample, and on all rows
_SEARCH_STEPS, _FEW_SEARCH_STEPS, _FINEST_STEP = 9, 4, 2.0**-9
_CODE_BYTES = 400  # approximate bytes of the codes themselves, independent of the count of numbers
_MAX_SCALE_FACTOR = 2.0  # the largest scale factor of a gradient for an unbiased projection


class _NormalisedRows(NamedTuple):
    """A matrix with normalised rows: `single` are its numbers divided by `scales`, which are relative to `top`."""

    single: Numbers
    scales: Numbers
    codes: npt.NDArray[np.uint8]
    top: float


class _Quantisation(NamedTuple):
    """A quantisation that was tried: its step (`distance`), its integers, and their bytes."""

    distance: float
    integers: Integers
    packed: Bytes


def quantise(x: Numbers, size: int, *, unbiased: bool) -> Bytes:
    """Quantise a matrix to `size` bytes. With `unbiased` it is scaled so that its inner product with the original
    equals the original's squared norm.

    >>> x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    >>> again = dequantise(quantise(x, 1024, unbiased=False), 64, 64)
    >>> bool(np.linalg.norm(x - again) < 0.4 * np.linalg.norm(x))
    True
    """
    rows = _normalise_rows(x)
    scales = deflate(rows.codes.tobytes())
    room = size - HEAD_BYTES - len(scales)
    distance, integers, packed = _quantise_to_size(rows.single, room)
    scale = np.float32(min(rows.top * distance * _scale_factor(rows, integers, distance, unbiased), float(_LARGEST)))
    head = scale.tobytes() + len(scales).to_bytes(4, "little")
    made = np.zeros(size, np.uint8)
    body = np.frombuffer(head + scales + packed.tobytes(), np.uint8)
    made[: body.size] = body
    return made


def dequantise(data: Bytes, rows: int, columns: int) -> Numbers:
    """Restore the matrix.

    >>> dequantise(quantise(np.zeros((2, 4), "float32"), 99, unbiased=True), 2, 4).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    if data.size < HEAD_BYTES:
        raise RemoteProtocolError(f"received {data.size} bytes of packed numbers, fewer than their header")
    scale = np.frombuffer(data[:4].tobytes(), "<f4")[0]
    size = int.from_bytes(data[4:HEAD_BYTES].tobytes(), "little")
    if data.size < HEAD_BYTES + size or not 0 <= scale < np.inf:
        raise RemoteProtocolError("packed numbers have an invalid header")
    codes = np.frombuffer(inflate(data[HEAD_BYTES : HEAD_BYTES + size].tobytes(), rows), np.uint8)
    integers, used = unpack(data[HEAD_BYTES + size :], rows, columns)
    if data[HEAD_BYTES + size + used :].any():
        raise RemoteProtocolError("packed numbers are followed by extra bytes")
    with np.errstate(over="ignore", under="ignore"):
        made = np.clip(integers * (_from_codes(codes) * scale)[:, None], -_LARGEST, _LARGEST)
    made[codes == _NONFINITE] = np.nan
    return made


def _normalise_rows(x: Numbers) -> _NormalisedRows:
    """Divide each row by a scale near its norm, in the form that is sent."""
    with np.errstate(all="ignore"):
        peaks = np.abs(x).max(axis=1, initial=0)
        safe = np.where((peaks > 0) & np.isfinite(peaks), peaks, 1)[:, None]
        norms = peaks * np.sqrt(np.square(x / safe).mean(axis=1))
    nonfinite = np.logical_not(np.isfinite(x).all(axis=1))
    norms = np.where(nonfinite, 0, norms).astype(np.float64)
    top = float(norms.max(initial=0))
    if top < _SMALLEST:
        return _NormalisedRows(
            np.zeros_like(x), np.zeros(len(x), np.float32), _to_codes(np.zeros(len(x)), nonfinite), 0.0
        )
    below = np.round(-_OCTAVE * np.log2(np.maximum(norms / top, 2.0**-40)))
    codes = _to_codes(np.minimum(below, _LOWEST), nonfinite)
    scales = _from_codes(codes)
    single = np.where(nonfinite[:, None], 0, x) / np.float32(top) / scales[:, None]
    return _NormalisedRows(single.astype(np.float32), scales, codes, top)


def _to_codes(below: npt.NDArray[np.float64], nonfinite: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    return np.where(nonfinite, _NONFINITE, below).astype(np.uint8)


def _from_codes(codes: npt.NDArray[np.uint8]) -> Numbers:
    """Two to the power of minus `codes` eighths."""
    return np.ldexp(_EIGHTHS[codes % _OCTAVE], -(codes // _OCTAVE).astype(np.int32))


def _quantise_to_size(single: Numbers, room: int) -> _Quantisation:
    """Search the finest step whose integers fit: on a sample of rows if there are many, then refined on all rows."""
    some = single[:: max(1, single.size // SAMPLED_NUMBERS)]
    finest = max(_FINEST_STEP, float(np.abs(single).max(initial=0)) / MAX_INTEGER)
    first = max(finest, 2.0 ** float(np.clip(2.05 - 8 * room / max(1, single.size), np.log2(_FINEST_STEP), 5)))
    if len(some) < len(single):
        share = len(some) / len(single)
        found = _search_step(
            some, room * share + _CODE_BYTES * (1 - share), first, finest=finest, steps=_SEARCH_STEPS, full=_FULL
        )
        tried = _search_step(single, room, found.distance, finest=finest, steps=_FEW_SEARCH_STEPS, full=_NEARLY_FULL)
    else:
        tried = _search_step(single, room, first, finest=finest, steps=_SEARCH_STEPS, full=_FULL)
    while tried.packed.size > room:
        tried = _quantise_by_step(single, 1.5 * tried.distance)
    return tried


def _search_step(
    single: Numbers, room: float, distance: float, *, finest: float, steps: int, full: float
) -> _Quantisation:
    """The finest step found to fit; if none fits, the coarsest that was tried.

    A step twice as large takes up to a bit a number less; with that estimate the limit is bracketed from both sides.
    """
    fits: _Quantisation | None = None
    fails: float | None = None
    for _ in range(steps):
        tried = _quantise_by_step(single, distance)
        size = tried.packed.size
        if size <= room:
            fits = tried
            if size >= full * room or distance <= finest:
                break
        else:
            fails = distance
        excess_bits = 8 * (size - room) / max(1, single.size)
        factor = 2.0 ** float(np.clip(1.2 * excess_bits + np.sign(excess_bits) / 50, -2, 2))
        distance = float(np.sqrt(fits.distance * fails)) if fits and fails else max(finest, distance * factor)
    return fits or tried


def _quantise_by_step(single: Numbers, distance: float) -> _Quantisation:
    integers = np.clip(np.rint(single / np.float32(distance)), -MAX_INTEGER, MAX_INTEGER).astype(np.int16)
    return _Quantisation(distance, integers, pack(integers))


def _scale_factor(rows: _NormalisedRows, integers: Integers, distance: float, unbiased: bool) -> float:
    """The scale factor with the least error, or the unbiased one."""
    again = integers.astype(np.float32)
    product = _inner_product(rows, rows.single, again)
    if product <= 0:
        return 1.0
    itself = _inner_product(rows, rows.single, rows.single) if unbiased else product
    best = itself / (product if unbiased else _inner_product(rows, again, again))
    return float(np.clip(best / distance, 1 / _MAX_SCALE_FACTOR, _MAX_SCALE_FACTOR))


def _inner_product(rows: _NormalisedRows, a: Numbers, b: Numbers) -> float:
    """Inner product of two matrices of scaled rows, with the scales of the original rows."""
    weights = np.square(rows.scales.astype(np.float64))
    return float(np.einsum("ij,ij->i", a, b).astype(np.float64) @ weights)
