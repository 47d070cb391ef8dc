"""Differences of weights as they cross: made small by a codec, and what that leaves out goes with the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from whale_nebula.codec.objects import Codec
from whale_nebula.codec.sizes import fitting
from whale_nebula.codec.way import Way
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.runtime.channels import coding
from whale_nebula.runtime.channels.payload import Payload, read, written
from whale_nebula.schedule.rounds import GRAIN
from whale_nebula.wire.tensor import Bytes

_MORE = 64  # bytes that a codec's own may be more than the numbers were


@dataclass
class Differences:
    """One cluster's side of a way: encodes by fragment, and keeps by fragment what was left out.

    >>> from whale_nebula.codec.way import parse_way
    >>> ours = Differences(parse_way("int4"))
    >>> gone = np.float32([0.5, 1.0, 0.01])
    >>> data, there = ours.encode(0, gone)
    >>> there.tolist(), bool((ours.decode(data, 3) == there).all())
    ([0.43..., 1.00..., 0.0], True)
    >>> ours.encode(0, np.zeros(3, np.float32))[1].tolist()
    [0.06..., 0.0, 0.00...]
    """

    way: Way
    _left: dict[int, Numbers] = field(default_factory=dict)

    def encode(self, fragment: int, numbers: Numbers) -> tuple[Bytes, Numbers]:
        """The bytes that cross, and what the others will make of them."""
        if not self._codec(numbers.size) and not self.way.zstd:
            return numbers.view(np.uint8), numbers
        wanted = numbers + self._left[fragment] if fragment in self._left else numbers
        made = coding.encode(self._codec(numbers.size), tf.convert_to_tensor(_rows(wanted)))
        data = written(Payload(made.data), zstd=self.way.zstd)
        there = self.decode(data, numbers.size)
        self._left[fragment] = wanted - there
        return data, there

    def decode(self, data: Bytes, size: int) -> Numbers:
        """So many numbers again."""
        if not self._codec(size) and not self.way.zstd:
            return np.ascontiguousarray(data).view(np.float32)
        dims = dims_of(size)
        payload = read(data, dims[0], 0, 4 * dims[0] * dims[1] + _MORE, zstd=self.way.zstd)
        found, _ = coding.decode(self._codec(size), payload.data, dims, "float32")
        return np.asarray(found, np.float32).reshape(-1)[:size]

    def forget(self) -> None:
        """The weights were replaced: nothing of what was left out belongs to them."""
        self._left.clear()

    def _codec(self, size: int) -> Codec | None:
        return fitting(self.way.codec, "float32", dims_of(size))


def dims_of(size: int) -> tuple[int, int]:
    """A codec sees rows: of the grain, or one row of as many numbers as there are."""
    return (1, size) if size <= GRAIN else (-(-size // GRAIN), GRAIN)


def _rows(numbers: Numbers) -> Numbers:
    dims = dims_of(numbers.size)
    padded = np.zeros(dims, np.float32)
    padded.reshape(-1)[: numbers.size] = numbers
    return padded
