"""What of a codec a tensor gets: less of it, where all of it would not be fewer bytes.

A rule of sizes alone: the side that sends and the plan go by it, and what comes says by its number what was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from whale_nebula.codec.objects import Codec, Dims, Precision, Structure
from whale_nebula.codec.parts import Part
from whale_nebula.codec.precisions import Plain
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
