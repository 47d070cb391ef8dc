"""How many bytes a tensor is on its way, from its sizes and its codec alone: what plans say and what links carry.

Before what was encoded stand `PREFIX` bytes: which rung of the ladder it is, and what else is in it. What depends on
the values (rows that a mask leaves out, whole numbers in as many bits as they need, zstd) is not foreseen: the
payload is at most this.

Of differences (`nb.compress(delta=...)`) it says what a sample takes that was seen before, which is what a run goes on
with. The first time each that is held crosses whole, in half precision: in the first epoch a step takes about twice as
much with int8, and nearly four times as much with int4.
"""

from __future__ import annotations

from functools import lru_cache

from whale_nebula.codec.fitting import PREFIX, fitting, fitting_back, nbytes, parts_of, structure_in
from whale_nebula.codec.objects import Codec, Dims
from whale_nebula.codec.parts import Part
from whale_nebula.codec.precisions import Bits
from whale_nebula.codec.way import Way, parse_way

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
    if isinstance(way.codec, Bits):
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
