"""Costs of crossing at each cut with a codec: bytes, and seconds to encode and to decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whale_nebula.codec.registry import parse
from whale_nebula.codec.sizes import cost, payload_bytes, used_codec
from whale_nebula.codec.way import AUTO, AUTO_LADDER, NONE, Way, mirror_options, ways
from whale_nebula.planner.problem import Coded
from whale_nebula.spec import Spec


@dataclass(frozen=True)
class Tensor:
    """A tensor of a batch that crosses at a cut: its type and sizes, and whether its gradient crosses back."""

    dtype: str
    dims: tuple[int, ...]
    returns: bool

    @property
    def nbytes(self) -> int:
        """Bytes without a codec."""
        return Spec(self.dtype, self.dims).nbytes()


def code_crossings(
    compress: str | None, tensors: Sequence[Sequence[Tensor]], rows: int, measured: Mapping[str, float]
) -> tuple[Coded, ...]:
    """The codecs from which the planner may choose, the least lossy first; empty if nothing is to be encoded.

    `tensors` are those of each cut, for this number of rows. `measured` are seconds a byte, to encode and to decode, by
    codec; other codecs have the costs of `codec.sizes.cost`, which were measured on one machine.
    """
    if compress is None:
        return ()
    if compress != AUTO:
        return (_code(compress, *ways({"codec": parse(compress)}), tensors, rows, measured),)
    chosen = [(codec, *(ways(mirror_options(codec)) if codec != NONE else (Way(), Way()))) for codec in AUTO_LADDER]
    return tuple(_code(codec, there, back, tensors, rows, measured) for codec, there, back in chosen)


def _code(
    name: str, there: Way, back: Way, tensors: Sequence[Sequence[Tensor]], rows: int, measured: Mapping[str, float]
) -> Coded:
    sizes, seconds = np.zeros((2, len(tensors))), np.zeros((4, len(tensors)))
    for cut, crossing in enumerate(tensors):
        for each in crossing:
            for direction, way, forward in ((0, there, None), (1, back, there))[: 1 + each.returns]:
                coded = bool(each.dims) and Spec(each.dtype, each.dims).floating
                text = str(forward) if forward is not None else None
                size = payload_bytes(str(way), each.dtype, each.dims, text) if coded else each.nbytes
                sizes[direction, cut] += size / rows
                if coded:
                    taken = _coding_seconds(each, way, forward, measured)
                    seconds[2 * direction : 2 * direction + 2, cut] += np.array(taken) / rows
    return Coded(name, sizes[0], sizes[1], seconds)


def _coding_seconds(
    tensor: Tensor, way: Way, forward: Way | None, measured: Mapping[str, float]
) -> tuple[float, float]:
    """Seconds to encode and to decode a tensor or its gradient; 0 for a codec with unknown costs."""
    used = used_codec(way, tensor.dtype, tensor.dims, forward)
    if used is not None and str(used) in measured:
        each = measured[str(used)] * tensor.nbytes / 2.0
        return each, each
    return cost(used, tensor.dims, back=forward is not None) or (0.0, 0.0)
