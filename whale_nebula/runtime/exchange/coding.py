"""Encode a tensor to arrays and decode it: first the codec's structure, then its precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.codec import blocks
from whale_nebula.codec.blocks import restore, to_bf16, to_fp16
from whale_nebula.codec.objects import Codec, Dims, Precision, Structure
from whale_nebula.codec.packing import Mask, Zstd, join, pack_mask, shrink, split, unpack_mask, unshrink
from whale_nebula.codec.precisions import Plain
from whale_nebula.codec.sizes import PREFIX, parts_of, precision_in, structure_in
from whale_nebula.codec.way import Way, parse_way
from whale_nebula.errors import NonFiniteError, RemoteProtocolError
from whale_nebula.runtime.exchange.state import At, ChannelState
from whale_nebula.spec import Spec
from whale_nebula.wire.tensor import Bytes

MEASURE_EVERY = 50
_BEYOND = 65520.0  # what half precision rounds to infinity, and all above


def due(step: int) -> bool:
    """Whether the error is measured in a step, counted from 1.

    >>> [step for step in range(1, 102) if due(step)]
    [1, 2, 4, 8, 16, 32, 50, 64, 100]
    """
    return step > 0 and (step % MEASURE_EVERY == 0 or step & (step - 1) == 0)


def distance(x: Any, again: Any) -> float:
    """The norm of the difference by the norm of the tensor; 0 for a tensor of zeros that stayed so."""
    wide = tf.cast(x, tf.float32)
    off, size = tf.norm(wide - tf.cast(again, tf.float32)), tf.norm(wide)
    return float(off) if float(size) == 0 else float(off / size)


def count_clamped(x: Any) -> int:
    """How many numbers of a tensor half precision has to make smaller.

    Nearly always none: so its largest and its least are looked at, and counted is where they do not fit.

    >>> [count_clamped(tf.constant(x)) for x in ([1e9, -1e9, 1.0, float("inf")], [65504.0], [])]
    [2, 0, 0]
    """
    if x.dtype.size < 4 or not x.shape.num_elements():
        return 0 if x.dtype != tf.bfloat16 else int(blocks.count_overflows(x))
    fits = float(tf.reduce_max(x)) < _BEYOND and float(tf.reduce_min(x)) > -_BEYOND
    return 0 if fits else int(blocks.count_overflows(x))


class Made(NamedTuple):
    """Bytes, the structure's new state, and its residue; `clamped` numbers were too large for half precision."""

    data: Bytes
    state: Any = None
    residue: Any = None
    clamped: int = 0


def precision_of(codec: Codec | None) -> Precision:
    """The precision of a codec; numbers as they are where it has none."""
    return precision_in(codec) or Plain()


def encode(codec: Codec | None, x: Any, state: Any = None, key: Any = None) -> Made:
    """At the side that makes the tensor."""
    structure = structure_in(codec)
    if structure is None:
        return _encode_numbers(codec, [x], (), key)
    reduced = structure.reduce(state, x)
    made = _encode_numbers(codec, reduced.numbers, reduced.extras, key)
    return made._replace(state=reduced.state, residue=reduced.residue)


def own_structure(codec: Codec | None, *, back: bool) -> Structure | None:
    """The structure that a direction remembers something for: a gradient none that returns, which is its tensor's."""
    structure = structure_in(codec)
    return None if back and structure is not None and structure.returns else structure


def encode_back(codec: Codec | None, gradient: Any, state: Any, residue: Any, key: Any) -> Made:
    """The gradient: in the form that the tensor crossed in, where the codec's structure returns."""
    structure = structure_in(codec)
    if structure is None or not structure.returns:
        return encode(codec, gradient, state, key)
    return _encode_numbers(codec, structure.reduce_back(residue, gradient), (), key)


def decode(codec: Codec | None, data: Bytes, dims: Dims, dtype: str, state: Any = None) -> tuple[Any, Any]:
    """At the side that reads it: the tensor and the residue."""
    structure = structure_in(codec)
    numbers, extras = _arrays(codec, data, dims, dtype)
    if structure is None:
        return numbers[0], None
    x, residue = structure.expand(state, numbers, extras, dims)
    return restore(x, dtype), residue


def decode_back(codec: Codec | None, data: Bytes, dims: Dims, dtype: str, state: Any, residue: Any) -> Any:
    """The gradient, at the side that made the tensor."""
    structure = structure_in(codec)
    if structure is None or not structure.returns:
        return decode(codec, data, dims, dtype, state)[0]
    numbers, _ = _arrays(codec, data, dims, dtype, back=True)
    return restore(structure.expand_back(residue, numbers, dims), dtype)


def _encode_numbers(codec: Codec | None, numbers: Sequence[Any], extras: Sequence[Any], key: Any) -> Made:
    precision = precision_of(codec)
    arrays = [part for each in numbers for part in precision.encode(each, key)]
    clamped = sum(map(count_clamped, numbers)) if precision.clamps else 0
    return Made(join([_array(each) for each in (*arrays, *extras)]), clamped=clamped)


def _arrays(
    codec: Codec | None, data: Bytes, dims: Dims, dtype: str, *, back: bool = False
) -> tuple[list[Any], list[np.ndarray]]:
    """The numbers, decoded, and the extras."""
    structure, precision = structure_in(codec), precision_of(codec)
    left = (dims,) if structure is None else structure.numbers(dims)
    if left is None:
        raise RemoteProtocolError(f"a tensor of sizes {dims} came as {codec}, which would not make it smaller")
    found = split(data, parts_of(codec, dtype, dims, back=back))
    numbers: list[Any] = []
    at = 0
    if structure is not None and structure.widens and Spec(dtype, ()).nbytes() < 4:
        dtype = "float32"
    for each in left:
        count = len(precision.parts(each, dtype))
        numbers.append(precision.decode(found[at : at + count], each, dtype))
        at += count
    return numbers, found[at:]


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(x.numpy())


LADDER_EVERY = 10  # steps, between two looks at the next precision


def count_step(way: Way, state: ChannelState, at: At) -> tuple[ChannelState, bool]:
    """Count a step of training; whether the codec is used in this step."""
    if at.training and at.first:
        state = replace(state, steps=state.steps + 1)
    done = state.steps - 1 if at.training else state.steps
    return state, done >= way.start


def climb_ladder(way: Way, state: ChannelState, at: At, x: Any) -> ChannelState:
    """One rung further, where the next precision is near enough."""
    looks = at.training and at.first and (state.steps - 1 - way.start) % LADDER_EVERY == 0
    if way.auto or not looks or state.rung + 1 >= len(way.rungs):
        return state
    error = relative_error(way.rungs[state.rung + 1], x)
    return replace(state, rung=state.rung + 1) if error <= way.bound else state


def relative_error(codec: Codec | None, x: Any) -> float:
    """How far a precision is from the tensor: the norm of the difference, by the norm of the tensor."""
    precision = precision_of(codec)
    dims, dtype = tuple(int(size) for size in x.shape), x.dtype.name
    return distance(x, precision.decode(precision.encode(x), dims, dtype))


_SIZE = 4  # bytes that say how many there were before zstd


class Has(IntFlag):
    """What a payload has, one bit each."""

    ROWS = 1
    NEWS = 2
    ZSTD = 4
    CHANGES = 8


_KNOWN = int(Has.ROWS | Has.NEWS | Has.ZSTD | Has.CHANGES)


class Payload(NamedTuple):
    """The bytes of a codec with what belongs to them: the mask of the rows, and news of the state.

    `changes` says that they are those of differences of samples.
    """

    data: Bytes
    rows: Mask | None = None
    news: Bytes | None = None
    changes: bool = False


def payload_bytes(payload: Payload, *, zstd: bool) -> Bytes:
    """As it crosses."""
    has = Has.ROWS * (payload.rows is not None) | Has.NEWS * (payload.news is not None) | Has.CHANGES * payload.changes
    body = [] if payload.rows is None else [pack_mask(payload.rows)]
    body += [] if payload.news is None else [payload.news]
    whole = np.concatenate([*body, payload.data])
    small = shrink(whole, Zstd()) if zstd else None
    if small is not None and _SIZE + small.size < whole.size:
        whole = np.concatenate([np.array([whole.size], "<u4").view(np.uint8), small])
        has |= Has.ZSTD
    return np.concatenate([np.array([has, 0, 0, 0], np.uint8), whole])


def read(data: Bytes, rows: int, news: int, most: int, *, zstd: bool = True) -> Payload:
    """What crossed, for a tensor of so many rows and so many bytes of news if there are any; `most` bounds the rest."""
    if data.size < PREFIX or int(data[0]) & ~_KNOWN or data[1:PREFIX].any():
        raise RemoteProtocolError("an encoded tensor begins with bytes that mean nothing")
    has, body = Has(int(data[0])), data[PREFIX:]
    if (Has.ZSTD in has and not zstd) or (Has.NEWS in has and not news):
        raise RemoteProtocolError("an encoded tensor has what this boundary never sends")
    if Has.ZSTD in has:
        body = _open_payload(body, most + rows // 8 + 1 + news)
    mask = None
    if Has.ROWS in has:
        mask, body = unpack_mask(body[: -(-rows // 8)], rows), body[-(-rows // 8) :]
    told = None
    if Has.NEWS in has:
        told, body = body[:news], body[news:]
    return Payload(body, mask, told, Has.CHANGES in has)


def _open_payload(body: Bytes, most: int) -> Bytes:
    size = int(body[:_SIZE].view("<u4")[0]) if body.size >= _SIZE else most + 1
    if size > most:
        raise RemoteProtocolError(f"{size} bytes are said to be packed where there are at most {most}")
    return unshrink(body[_SIZE:], size, Zstd())


_CASTS = {"fp16": to_fp16, "bf16": to_bf16}


def encode_cast(way: str, tensor: Any) -> Any:
    """Make a tensor small for the line; what is no floating-point number goes as it is.

    >>> import tensorflow as tf
    >>> encode_cast("fp16", tf.constant([1e9, 1.0])).numpy().tolist()
    [65504.0, 1.0]
    """
    cast = parse_way(way).cast
    return tensor if cast is None or not tensor.dtype.is_floating else _CASTS[cast](tensor)


def decode_cast(tensor: Any, dtype: Any) -> Any:
    """Give a tensor back its own element type."""
    return tensor if tensor.dtype == dtype else restore(tensor, dtype.name)


SKIP = "skip"


def needs_finite_check(way: Way, codec: Codec | None, dims: Dims, at: At, *, back: bool) -> bool:
    """Whether a tensor is looked at, which takes a pass over it."""
    return (at.training and way.nonfinite == SKIP) or _remembers(way, codec, dims, back=back)


def is_whole(x: Any) -> bool:
    """Whether all numbers of a tensor are finite.

    >>> is_whole(tf.constant([1.0, 2.0])), is_whole(tf.constant([1.0, float("inf")])), is_whole(tf.zeros([0]))
    (True, False, True)
    """
    return not x.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(x)))


def left_out(way: Way, boundary: str, stage: str, at: At) -> str:
    """Why the step is to be left out, in words; where it must not be, the error that stops the run. Nothing in an
    evaluation.
    """
    if not at.training:
        return ""
    if way.nonfinite != SKIP:
        raise NonFiniteError(
            f"{boundary} has a NaN or an infinity",
            boundary=boundary,
            stage=stage,
            step=at.step + 1,
            micro_batch=at.micro_batch,
            why="it would stay in what both sides of this boundary remember, and spoil all steps after this one",
        )
    return f"{boundary} has a NaN or an infinity in micro-batch {at.micro_batch} of stage {stage!r}"


def _remembers(way: Way, codec: Codec | None, dims: Dims, *, back: bool) -> bool:
    if codec is None:
        return False
    structure = own_structure(codec, back=back)
    if structure is not None and not structure.careful and (structure.init(dims) is not None or structure.news(dims)):
        return True
    return way.delta is not None and not back
