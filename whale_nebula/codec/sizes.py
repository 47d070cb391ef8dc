"""Encoded size in bytes of a tensor, from its shape and codec alone; used by plans and links alike.

The encoded bytes follow a header of `PREFIX` bytes: flags of the optional parts. Savings that depend on the values
(rows omitted by a mask, integers in as many bits as they need, zstd) are not counted: the size is an upper bound.

For differences (`nb.compress(delta=...)`) it is the size for samples that were sent before, which applies after the
first epoch. New samples are sent in full, in half precision: in the first epoch a step sends about twice as much with
int8, and nearly four times as much with int4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from whale_nebula.codec.blocks import rows_and_columns
from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.codec.objects import CALL_SECONDS, COPY_SECONDS, PLAIN, Codec, Cost
from whale_nebula.codec.packing import PREFIX, Dims, Part
from whale_nebula.codec.precisions import is_integers
from whale_nebula.spec import Spec


@lru_cache(maxsize=4096)
def choose_codec(codec: Codec | None, dtype: str, dims: Dims, *, taken: bool = False) -> Codec | None:
    """The codec that is used for a tensor: the codec itself, its precision only if its structure would not save bytes,
    or None.

    A structure that returns is used for the gradient only if the tensor was encoded by it (`taken`).

    >>> from whale_nebula.codec import FP16, INT4, SVD, TopK
    >>> [str(choose_codec(SVD(0.6) >> FP16(), "float32", dims)) for dims in ((8192, 768), (4, 1))]
    ['svd(0.6) >> fp16', 'fp16']
    >>> str(choose_codec(TopK(0.9) >> INT4(), "float32", (64, 64))), choose_codec(INT4(), "float32", (64, 0))
    ('int4', None)
    """
    if codec is None:
        return None
    alone, structure = codec.precision, codec.structure
    if structure is not None and structure.follows:
        return codec if taken else choose_codec(alone, dtype, dims)
    raw, least = Spec(dtype, dims).nbytes(), _encoded_size(alone, dtype, dims)
    small = alone if alone is not None and dims and PREFIX + least < raw else None
    if structure is None or not dims or structure.numbers(dims) is None:
        return small
    if not structure.shrinks:
        return None if small is None else codec
    return codec if PREFIX + _encoded_size(codec, dtype, dims) < min(least, raw) else small


def nbytes(parts: Sequence[Part]) -> int:
    """Total bytes of arrays."""
    return sum(Spec(part.dtype, part.dims).nbytes() for part in parts)


def mask_saves_bytes(codec: Codec | None, dtype: str, dims: Dims, kept_rows: int) -> bool:
    """Whether sending only `kept_rows` rows with a mask takes fewer bytes than sending all rows.

    >>> [mask_saves_bytes(None, "float32", (rows, 4), kept_rows=rows - 1) for rows in (80, 800)]
    [True, False]
    """
    rows = (kept_rows, dims[-1])
    some, every = choose_codec(codec, dtype, rows), choose_codec(codec, dtype, dims)
    return _encoded_size(some, dtype, rows) + -(-prod(dims[:-1]) // 8) < _encoded_size(every, dtype, dims)


def _encoded_size(codec: Codec | None, dtype: str, dims: Dims) -> int:
    return nbytes((codec or PLAIN).arrays(dims, dtype))


_HEADER_BYTES = 64  # bytes: headers of packed numbers and of zstd
_MASK_BYTES = 1 << 16  # bytes: a bit for each row or sample, whose number is known only in a step


@lru_cache(maxsize=65536)
def payload_bytes(text: str, dtype: str, dims: Dims, forward: str | None = None) -> int:
    """Bytes of a micro-batch of a boundary; of its gradient, if `forward` is the encoding of the tensor itself.

    It is the size on the last rung of the ladder, after its first step.

    >>> payload_bytes("none", "float32", (8, 64)), payload_bytes("fp16", "float32", (8, 64))
    (2048, 1024)
    >>> payload_bytes("topk(0.25)", "float32", (8, 64)), payload_bytes("topk(0.25)", "float32", (8, 64), "topk(0.25)")
    (580, 516)
    """
    encoding, raw = parse_encoding(text), nbytes([Part(dtype, dims)])
    if encoding.plain or not dims:
        return raw
    if encoding.cast is not None:
        return _encoded_size(encoding.codec, dtype, dims)
    if encoding.lossless:
        return PREFIX + raw
    used = used_codec(encoding, dtype, dims, None if forward is None else parse_encoding(forward))
    if used is None and encoding.mask is None and not encoding.zstd:
        return raw
    marks, crossing = (
        (0, used) if used is None else (sample_mask_bytes(encoding, dims), used.returned if forward else used)
    )
    return PREFIX + marks + _encoded_size(crossing, dtype, dims)


def used_codec(encoding: Encoding, dtype: str, dims: Dims, forward: Encoding | None = None) -> Codec | None:
    """The part of an encoding's codec that applies to a tensor of these sizes, or to its gradient."""
    if forward is None:
        return choose_codec(encoding.codec, dtype, dims)
    there, back = choose_codec(forward.codec, dtype, dims), encoding.returned.codec
    used = choose_codec(back, dtype, dims, taken=there is not None and there.structure is not None)
    return encoding.codec if used == back else used


def sample_mask_bytes(encoding: Encoding, dims: Dims) -> int:
    """Bytes of the mask of the samples, along the first axis, that are sent as differences.

    >>> [sample_mask_bytes(parse_encoding(text), (12, 64)) for text in ("int8, delta ids", "int8")]
    [2, 0]
    """
    return -(-dims[0] // 8) if encoding.delta is not None and len(dims) > 1 else 0


def extra_bytes(encoding: Encoding, dims: Dims) -> int:
    """Upper bound of a payload's bytes other than the tensor's: header, and news of a state."""
    news = () if encoding.structure is None else encoding.structure.news(dims)
    marks = 0 if encoding.mask is None and encoding.delta is None else _MASK_BYTES
    return PREFIX + _HEADER_BYTES + marks + nbytes(news)


_BIT_PACKING_COST = Cost(2.6e-9, 7.5e-9)  # of an integer

_DELTA_PASSES = Cost(16, 13)
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
        return _BIT_PACKING_COST.times(prod(dims)) + Cost(CALL_SECONDS, CALL_SECONDS)
    structure, precision = codec.structure, codec.precision
    left = (dims,) if structure is None else structure.numbers(dims)
    if left is None:
        structure, left = None, (dims,)
    second = Cost() if precision is None else precision.cost(sum(map(prod, left)), back=back)
    if delta and is_integers(codec) and len(dims) > 1 and second is not None:
        return Cost(second.encode) + _DELTA_PASSES.times(COPY_SECONDS * prod(dims))
    if structure is None or second is None:
        return second
    first = structure.cost(*rows_and_columns(dims))
    return None if first is None else first + Cost(CALL_SECONDS, CALL_SECONDS) + second


def estimate_renewal(codec: Codec | None, dims: Dims) -> float:
    """Seconds per step in which the sender updates a shared basis or axes: it samples rows of the first micro-batch,
    and renews them at intervals.

    >>> from whale_nebula.codec import parse
    >>> [round(1e3 * estimate_renewal(parse(text), (8192, 768)), 1) for text in ("rank(96) >> int8", "int8")]
    [5.0, 0.0]
    """
    structure = None if codec is None else codec.structure
    if structure is None or not dims or structure.numbers(dims) is None:
        return 0.0
    return structure.renewal_seconds(*rows_and_columns(dims))
