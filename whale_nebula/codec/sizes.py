"""Encoded size in bytes of a tensor, from its shape and codec alone; used by plans and links alike.

Before what was encoded stand `PREFIX` bytes: which rung of the ladder it is, and what else is in it. What depends on
the values (rows that a mask leaves out, whole numbers in as many bits as they need, zstd) is not foreseen: the
payload is at most this.

Of differences (`nb.compress(delta=...)`) it says what a sample takes that was seen before, which is what a run goes on
with. The first time each that is held crosses whole, in half precision: in the first epoch a step takes about twice as
much with int8, and nearly four times as much with int4.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.entropy_coding import LOOKED_AT as TRIED
from whale_nebula.codec.entropy_coding import Coded
from whale_nebula.codec.objects import Codec, Dims, Part, Precision, Structure
from whale_nebula.codec.precisions import BF16, FP16, INT4, INT8, Plain, is_integers
from whale_nebula.codec.structures import LOOKED_AT, RENEWED, SVD, Rank, TopK, matrix
from whale_nebula.codec.way import Way, parse_way
from whale_nebula.spec import Spec

PREFIX = 4
"""Bytes before what was encoded: which parts there are."""


def structure_in(codec: Codec | None) -> Structure | None:
    """The structure of a codec, if it has one."""
    return next((part for part in _members(codec) if isinstance(part, Structure)), None)


def precision_in(codec: Codec | None) -> Precision | None:
    """Its precision."""
    return next((part for part in _members(codec) if isinstance(part, Precision)), None)


@lru_cache(maxsize=4096)
def fitting(codec: Codec | None, dtype: str, dims: Dims) -> Codec | None:
    """The codec itself, its precision alone where its structure would not make the bytes fewer, or None: no codec does.

    >>> from whale_nebula.codec import FP16, INT4, SVD, TopK
    >>> str(fitting(SVD(0.6) >> FP16(), "float32", (8192, 768))), str(fitting(SVD(0.6) >> FP16(), "float32", (4, 1)))
    ('svd(0.6) >> fp16', 'fp16')
    >>> str(fitting(TopK(0.9) >> INT4(), "float32", (64, 64))), fitting(INT4(), "float32", (64, 0))
    ('int4', None)
    """
    alone, structure = precision_in(codec), structure_in(codec)
    raw = Spec(dtype, dims).nbytes()
    small = alone if alone is not None and dims and PREFIX + _size(alone, dtype, dims) < raw else None
    if structure is None or not dims or structure.numbers(dims) is None:
        return small
    if not structure.shrinks:
        return None if small is None else codec
    return codec if PREFIX + _size(codec, dtype, dims) < min(_size(alone, dtype, dims), raw) else small


def fitting_back(codec: Codec | None, dtype: str, dims: Dims, *, taken: bool) -> Codec | None:
    """The same for a gradient: a structure that returns is used just where the tensor crossed by it (`taken`)."""
    structure = structure_in(codec)
    if structure is None or not structure.returns:
        return fitting(codec, dtype, dims)
    return codec if taken else fitting(precision_in(codec), dtype, dims)


def parts_of(codec: Codec | None, dtype: str, dims: Dims, *, back: bool = False) -> tuple[Part, ...]:
    """The arrays that a tensor becomes, in the order in which they cross; of a gradient, where `back`.

    >>> from whale_nebula.codec import FP16, TopK
    >>> parts_of(TopK(0.5) >> FP16(), "float32", (2, 8))
    (Part(dtype='float16', dims=(2, 4)), Part(dtype='uint8', dims=(2,)))
    """
    structure, precision = structure_in(codec), precision_in(codec) or Plain()
    left = (dims,) if structure is None else structure.numbers(dims) or ()
    encoded = [part for each in left for part in precision.parts(each, dtype)]
    extras = () if structure is None or (back and structure.returns) else structure.extras(dims)
    return (*encoded, *extras)


def nbytes(parts: Sequence[Part]) -> int:
    """Bytes of arrays, one after the other."""
    return sum(Spec(part.dtype, part.dims).nbytes() for part in parts)


def elides(codec: Codec | None, dtype: str, dims: Dims, kept: int) -> bool:
    """Whether to send `kept` rows, and a bit for every row, is less than to send them all.

    >>> elides(None, "float32", (80, 4), kept=79), elides(None, "float32", (800, 4), kept=799)
    (True, False)
    """
    rows = (kept, dims[-1])
    some, every = fitting(codec, dtype, rows), fitting(codec, dtype, dims)
    return nbytes(parts_of(some, dtype, rows)) + -(-prod(dims[:-1]) // 8) < nbytes(parts_of(every, dtype, dims))


def _size(codec: Codec | None, dtype: str, dims: Dims) -> int:
    return nbytes(parts_of(codec, dtype, dims))


def _members(codec: Codec | None) -> tuple[Codec, ...]:
    return () if codec is None else codec.members


_SLACK = 64  # bytes: what is said before packed numbers and in front of zstd
_MARKS = 1 << 16  # bytes: a bit for each row or sample, of which only a step knows how many there are


@lru_cache(maxsize=65536)
def payload_bytes(way: str, dtype: str, dims: Dims, forward: str | None = None) -> int:
    """Bytes of a micro-batch of a boundary; of its gradient, where `forward` says how the tensor itself crosses.

    >>> payload_bytes("none", "float32", (8, 64)), payload_bytes("fp16", "float32", (8, 64))
    (2048, 1024)
    >>> payload_bytes("topk(0.25)", "float32", (8, 64)), payload_bytes("topk(0.25)", "float32", (8, 64), "topk(0.25)")
    (580, 516)
    """
    return encoded_bytes(parse_way(way), dtype, dims, None if forward is None else parse_way(forward))


def encoded_bytes(way: Way, dtype: str, dims: Dims, forward: Way | None = None) -> int:
    """The same for a way that was read already: on its last rung, once it has begun."""
    raw = nbytes([Part(dtype, dims)])
    if way.plain or not dims:
        return raw
    if way.cast is not None:
        return nbytes(parts_of(way.codec, dtype, dims))
    if way.lossless:
        return PREFIX + raw
    used = used_codec(way, dtype, dims, forward)
    if used is None and way.mask is None and not way.zstd:
        return raw
    marks = 0 if used is None else marks_bytes(way, dims)
    return PREFIX + marks + nbytes(parts_of(used, dtype, dims, back=forward is not None))


def used_codec(way: Way, dtype: str, dims: Dims, forward: Way | None = None) -> Codec | None:
    """What of a way's codec a tensor of these sizes gets, or its gradient."""
    if forward is None:
        return fitting(way.codec, dtype, dims)
    taken = structure_in(fitting(forward.codec, dtype, dims)) is not None
    return fitting_back(way.codec, dtype, dims, taken=taken)


def marks_bytes(way: Way, dims: Dims) -> int:
    """The bits that say of each sample, which lie along the first axis, whether its change crosses or all of it.

    >>> marks_bytes(parse_way("int8, delta ids"), (12, 64)), marks_bytes(parse_way("int8"), (12, 64))
    (2, 0)
    """
    return -(-dims[0] // 8) if way.delta is not None and len(dims) > 1 else 0


def extra_bytes(way: Way, dims: Dims) -> int:
    """How much more than the tensor itself a payload may have: what stands before it, and news of a state."""
    news = () if way.structure is None else way.structure.news(dims)
    marks = 0 if way.mask is None and way.delta is None else _MARKS
    return PREFIX + _SLACK + marks + nbytes(news)


def number(way: Way, codec: Codec | None) -> int:
    """The number of a codec among those of a way, never 0; None is what encodes nothing, and leaves out rows at most.

    >>> from whale_nebula.codec.way import parse_way
    >>> way = parse_way("int4, ramp int8 below 0.05")
    >>> [number(way, codec) > 0 for codec in (*way.rungs, None)], number(way, way.codec) == number(way, None)
    ([True, True, True], False)
    """
    return next(found for found, each in by_number(way).items() if each == codec)


@lru_cache(maxsize=1024)
def by_number(way: Way) -> dict[int, Codec | None]:
    """The codecs that may come on a way: those of its ladder, the precisions of each alone, and none.

    Two whose texts give the same 16 bits have neighbouring numbers: the order is the way's.
    """
    found: dict[int, Codec | None] = {}
    for codec in (None, *way.rungs, *map(precision_in, way.rungs)):
        if codec not in found.values():
            found[_free(zlib.crc32(str(codec or Plain()).encode()) % 0xFFFF + 1, found)] = codec
    return found


def numbers(way: Way) -> frozenset[int]:
    """Their numbers."""
    return frozenset(by_number(way))


def _free(wanted: int, taken: dict[int, Codec | None]) -> int:
    """The first from the wanted one on that is not taken."""
    return next(each % 0xFFFF + 1 for each in range(wanted - 1, wanted + len(taken)) if each % 0xFFFF + 1 not in taken)


CALL, CAST = 0.6e-3, 0.15e-3
"""Seconds for each call of an encoder or a decoder, however small the tensor is; casts are one operation."""

SPEED = 110e9
"""Floating-point operations a second in products of matrices."""

EIGEN = 0.18e-9
"""Seconds for the eigenvectors of an n x n matrix, by n^3."""

COPY = 0.9e-9
"""Seconds a number, to write what a product makes."""


class Cost(NamedTuple):
    """Seconds, at the side that sends and at the side that takes.

    >>> Cost(0.25, 0.5) + Cost(1, 1)
    Cost(encode=1.25, decode=1.5)
    """

    encode: float = 0.0
    decode: float = 0.0

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.encode + self.decode

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.encode + other.encode, self.decode + other.decode)


_NANOSECONDS: Mapping[type[Precision], tuple[Cost, Cost]] = {
    FP16: (Cost(1.1, 1.1), Cost(1.1, 1.1)),
    BF16: (Cost(0.9, 1.1), Cost(0.9, 1.1)),
    INT8: (Cost(2.3, 1.6), Cost(3.1, 1.7)),
    INT4: (Cost(3.3, 2.3), Cost(4.1, 2.3)),
    Coded: (Cost(20.0, 8.5), Cost(20.0, 8.5)),
}
"""A number's, rounded to the nearest and (for gradients) to be right on average."""

_SEARCH = 90e-9
"""Seconds for each number on which `Coded` tries how fine it may be."""

_TOP = Cost(8.8, 7.3)
"""A number's, to find the largest of each row and to put them back."""

_GRAM_PASSES = 4
"""Over the running Gram matrix in a step: to let it fade, add to it and look for NaN."""

_ITERATIONS, _SVD, _UPRIGHT = 2, 20, 12
"""Steps of subspace iteration in float64; a singular value decomposition, by an eigen-decomposition; products that make
axes orthonormal again.
"""

_BITS = Cost(2.6, 7.5)
"""A whole number's."""

_PASSES = Cost(16, 13)
"""How often differences of samples go over all numbers, beside encoding integers. Both sides fetch what they hold (1),
make the integers wide, multiply, add, cut off and round (8), and write it, checked, with a sum over it (4); who sends
looks for NaN and takes the difference before (3). Counted in the code, not measured.
"""


def cost(codec: Codec | None, dims: Dims, *, back: bool = False, delta: bool = False) -> Cost | None:
    """What it takes to encode and decode a tensor of these sizes, or a gradient; None where that is not known.

    Of the papers' codec nearly all is the decomposition; a basis that both sides hold costs a ninth of that. With
    `delta` differences of samples are sent that both sides hold.

    >>> from whale_nebula.codec import parse
    >>> for text in ("fp16", "int8", "svd(0.9) >> fp16", "rank(96) >> int8"):
    ...     print(text, f"{cost(parse(text), (8192, 768)).seconds:.3f} s")
    fp16 0.014 s
    int8 0.026 s
    svd(0.9) >> fp16 0.289 s
    rank(96) >> int8 0.034 s
    """
    if codec is None or not dims:
        return Cost()
    if codec.lossless:
        return _times(_BITS, 1e-9 * prod(dims)) + Cost(CALL, CALL)
    structure, precision = structure_in(codec), precision_in(codec)
    left = (dims,) if structure is None else structure.numbers(dims)
    if left is None:
        structure, left = None, (dims,)
    first = Cost() if structure is None else _structure(structure, dims)
    second = _precision(precision, sum(map(prod, left)), back=back)
    if delta and is_integers(codec) and len(dims) > 1 and second is not None:
        return Cost(second.encode) + _times(_PASSES, COPY * prod(dims))
    return None if first is None or second is None else first + second


def renewing(codec: Codec | None, dims: Dims) -> float:
    """Seconds a step that a shared basis takes the side that sends, besides: to look at some rows of the first
    micro-batch, and every so many steps to make the basis anew.

    >>> from whale_nebula.codec import parse
    >>> [round(1e3 * renewing(parse(text), (8192, 768)), 1) for text in ("rank(96) >> int8", "int8")]
    [5.0, 0.0]
    """
    structure = structure_in(codec)
    if not isinstance(structure, Rank | Axes) or len(dims) < 1 or structure.numbers(dims) is None:
        return 0.0
    rows, n = matrix(dims)
    seen = 2.0 * min(rows, LOOKED_AT) * n * n / SPEED + _GRAM_PASSES * COPY * n * n
    if isinstance(structure, Axes):
        return seen + (_UPRIGHT * 2 * n**3 / (SPEED / 2) + EIGEN * n**3) / RENEWED
    r = structure.r
    return seen + (_ITERATIONS * (2 * n * n * r + 6 * n * r * r) / (SPEED / 2) + _SVD * EIGEN * r**3) / RENEWED


def _precision(precision: Precision | None, count: int, *, back: bool) -> Cost | None:
    if precision is None:
        return Cost()
    found = _NANOSECONDS.get(type(precision))
    call = CAST if precision.casts else CALL
    search = _SEARCH * min(count, TRIED) if isinstance(precision, Coded) else 0.0
    return None if found is None else _times(found[back], 1e-9 * count) + Cost(call + search, call)


def _structure(structure: Structure, dims: Dims) -> Cost | None:
    guess = _STRUCTURES.get(type(structure))
    return None if guess is None else guess(structure, *matrix(dims)) + Cost(CALL, CALL)


def _svd(svd: Structure, m: int, n: int) -> Cost:
    """The Gram matrix of the shorter side (it is symmetric: half a product), its eigenvectors, and a product."""
    short = min(m, n)
    numbers = svd.numbers((m, n)) or ((0, 0),)
    product = 2.0 * m * n * numbers[0][1] / SPEED
    return Cost(m * n * short / SPEED + EIGEN * short**3 + product, product + COPY * m * n)


def _rank(rank: Structure, m: int, n: int) -> Cost:
    """A product with the basis each way; what makes the basis itself is `renewing`."""
    (*_, r), *_ = rank.numbers((m, n)) or ((0,),)
    product = 2.0 * m * n * r / SPEED
    return Cost(product + COPY * m * r, product + COPY * m * n)


def _axes(axes: Structure, m: int, n: int) -> Cost:
    """A product with them each way; what makes them is `renewing`."""
    product = 2.0 * m * n * n / SPEED + COPY * m * n
    return Cost(product, product)


def _topk(topk: Structure, m: int, n: int) -> Cost:
    return _times(_TOP, 1e-9 * m * n)


_STRUCTURES: Mapping[type[Structure], Callable[[Structure, int, int], Cost]] = {
    SVD: _svd, Rank: _rank, TopK: _topk, Axes: _axes
}  # fmt: skip


def _times(each: Cost, count: float) -> Cost:
    return Cost(each.encode * count, each.decode * count)
