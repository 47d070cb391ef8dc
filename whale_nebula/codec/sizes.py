"""Encoded size in bytes of a tensor, from its shape and codec alone; used by plans and links alike.

The encoded bytes follow a header of `PREFIX` bytes: the rung of the ladder, and the optional parts. Savings that depend
on the values (rows omitted by a mask, integers in as many bits as they need, zstd) are not counted: the size is an
upper bound.

For differences (`nb.compress(delta=...)`) it is the size for samples that were sent before, which applies after the
first epoch. New samples are sent in full, in half precision: in the first epoch a step sends about twice as much with
int8, and nearly four times as much with int4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from whale_nebula.codec.blocks import rows_and_columns
from whale_nebula.codec.objects import CALL, COPY, PLAIN, Codec, Cost
from whale_nebula.codec.packing import PREFIX, Dims, Part
from whale_nebula.codec.precisions import is_integers
from whale_nebula.codec.way import Way, parse_way
from whale_nebula.spec import Spec


@lru_cache(maxsize=4096)
def fitting(codec: Codec | None, dtype: str, dims: Dims, *, taken: bool = False) -> Codec | None:
    """The codec that is used for a tensor: the codec itself, its precision only if its structure would not save bytes,
    or None.

    A structure that returns is used for the gradient only if the tensor was encoded by it (`taken`).

    >>> from whale_nebula.codec import FP16, INT4, SVD, TopK
    >>> str(fitting(SVD(0.6) >> FP16(), "float32", (8192, 768))), str(fitting(SVD(0.6) >> FP16(), "float32", (4, 1)))
    ('svd(0.6) >> fp16', 'fp16')
    >>> str(fitting(TopK(0.9) >> INT4(), "float32", (64, 64))), fitting(INT4(), "float32", (64, 0))
    ('int4', None)
    """
    if codec is None:
        return None
    alone, structure = codec.precision, codec.structure
    if structure is not None and structure.follows:
        return codec if taken else fitting(alone, dtype, dims)
    raw, least = Spec(dtype, dims).nbytes(), _size(alone, dtype, dims)
    small = alone if alone is not None and dims and PREFIX + least < raw else None
    if structure is None or not dims or structure.numbers(dims) is None:
        return small
    if not structure.shrinks:
        return None if small is None else codec
    return codec if PREFIX + _size(codec, dtype, dims) < min(least, raw) else small


def nbytes(parts: Sequence[Part]) -> int:
    """Total bytes of arrays."""
    return sum(Spec(part.dtype, part.dims).nbytes() for part in parts)


def elides(codec: Codec | None, dtype: str, dims: Dims, kept: int) -> bool:
    """Whether sending `kept` rows with a mask takes fewer bytes than sending all rows.

    >>> elides(None, "float32", (80, 4), kept=79), elides(None, "float32", (800, 4), kept=799)
    (True, False)
    """
    rows = (kept, dims[-1])
    some, every = fitting(codec, dtype, rows), fitting(codec, dtype, dims)
    return _size(some, dtype, rows) + -(-prod(dims[:-1]) // 8) < _size(every, dtype, dims)


def _size(codec: Codec | None, dtype: str, dims: Dims) -> int:
    return nbytes((codec or PLAIN).arrays(dims, dtype))


_SLACK = 64  # bytes: headers of packed numbers and of zstd
_MARKS = 1 << 16  # bytes: a bit for each row or sample, whose number is known only in a step


@lru_cache(maxsize=65536)
def payload_bytes(text: str, dtype: str, dims: Dims, forward: str | None = None) -> int:
    """Bytes of a micro-batch of a boundary; of its gradient, if `forward` is the encoding of the tensor itself.

    It is the size on the last rung of the way, after its first step.

    >>> payload_bytes("none", "float32", (8, 64)), payload_bytes("fp16", "float32", (8, 64))
    (2048, 1024)
    >>> payload_bytes("topk(0.25)", "float32", (8, 64)), payload_bytes("topk(0.25)", "float32", (8, 64), "topk(0.25)")
    (580, 516)
    """
    way, raw = parse_way(text), nbytes([Part(dtype, dims)])
    if way.plain or not dims:
        return raw
    if way.cast is not None:
        return _size(way.codec, dtype, dims)
    if way.lossless:
        return PREFIX + raw
    used = used_codec(way, dtype, dims, None if forward is None else parse_way(forward))
    if used is None and way.mask is None and not way.zstd:
        return raw
    marks, crossing = (0, used) if used is None else (marks_bytes(way, dims), used.returned if forward else used)
    return PREFIX + marks + _size(crossing, dtype, dims)


def used_codec(way: Way, dtype: str, dims: Dims, forward: Way | None = None) -> Codec | None:
    """The part of a way's codec that applies to a tensor of these sizes, or to its gradient."""
    if forward is None:
        return fitting(way.codec, dtype, dims)
    there, back = fitting(forward.codec, dtype, dims), way.returned.codec
    used = fitting(back, dtype, dims, taken=there is not None and there.structure is not None)
    return way.codec if used == back else used


def marks_bytes(way: Way, dims: Dims) -> int:
    """Bytes of the mask of the samples, along the first axis, that are sent as differences.

    >>> marks_bytes(parse_way("int8, delta ids"), (12, 64)), marks_bytes(parse_way("int8"), (12, 64))
    (2, 0)
    """
    return -(-dims[0] // 8) if way.delta is not None and len(dims) > 1 else 0


def extra_bytes(way: Way, dims: Dims) -> int:
    """Upper bound of a payload's bytes other than the tensor's: header, and news of a state."""
    news = () if way.structure is None else way.structure.news(dims)
    marks = 0 if way.mask is None and way.delta is None else _MARKS
    return PREFIX + _SLACK + marks + nbytes(news)


_BITS = Cost(2.6e-9, 7.5e-9)  # of an integer

_PASSES = Cost(16, 13)
"""Passes over all numbers for differences of samples, in addition to encoding integers. Both sides fetch the cached
rows (1), widen the integers, multiply, add, clip and round (8), and write the result, checked, with a checksum (4); the
sender first checks for NaN and subtracts (3). Counted in the code, not measured.
"""


def cost(codec: Codec | None, dims: Dims, *, back: bool = False, delta: bool = False) -> Cost | None:
    """Cost to encode and decode a tensor of these sizes, or its gradient; None if unknown.

    The papers' codec spends nearly all of it on the decomposition; a basis that both sides hold costs a ninth of that.
    With `delta` differences of cached samples are sent.

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
        return _BITS.times(prod(dims)) + Cost(CALL, CALL)
    structure, precision = codec.structure, codec.precision
    left = (dims,) if structure is None else structure.numbers(dims)
    if left is None:
        structure, left = None, (dims,)
    second = Cost() if precision is None else precision.cost(sum(map(prod, left)), back=back)
    if delta and is_integers(codec) and len(dims) > 1 and second is not None:
        return Cost(second.encode) + _PASSES.times(COPY * prod(dims))
    if structure is None or second is None:
        return second
    first = structure.cost(*rows_and_columns(dims))
    return None if first is None else first + Cost(CALL, CALL) + second


def renewing(codec: Codec | None, dims: Dims) -> float:
    """Seconds a step in which the sender updates a shared basis: it samples rows of the first micro-batch, and renews
    the basis at intervals.

    >>> from whale_nebula.codec import parse
    >>> [round(1e3 * renewing(parse(text), (8192, 768)), 1) for text in ("rank(96) >> int8", "int8")]
    [5.0, 0.0]
    """
    structure = None if codec is None else codec.structure
    if structure is None or not dims or structure.numbers(dims) is None:
        return 0.0
    return structure.renewal_seconds(*rows_and_columns(dims))
