"""A tensor to arrays and back by a codec: its structure, then its precision for each of the numbers that are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whale_nebula.codec.objects import Codec, Dims, Precision, Structure
from whale_nebula.codec.packing import join, split
from whale_nebula.codec.precisions import FP16, Plain
from whale_nebula.codec.rounding import restore
from whale_nebula.codec.sizes import parts_of, precision_in, structure_in
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.runtime.channels import measuring
from whale_nebula.spec import Spec
from whale_nebula.wire.tensor import Bytes


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
        return _made(codec, [x], (), key)
    reduced = structure.reduce(state, x)
    made = _made(codec, reduced.numbers, reduced.extras, key)
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
    return _made(codec, structure.reduce_back(residue, gradient), (), key)


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


def _made(codec: Codec | None, numbers: Sequence[Any], extras: Sequence[Any], key: Any) -> Made:
    precision = precision_of(codec)
    arrays = [part for each in numbers for part in precision.encode(each, key)]
    clamped = sum(map(measuring.clamped, numbers)) if isinstance(precision, FP16) else 0
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
