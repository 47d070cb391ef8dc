"""Encode weight differences with error feedback: what a codec leaves out is added to the next difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.objects import Codec
from whale_nebula.codec.sizes import fitting
from whale_nebula.codec.way import Way
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.ir.program import Program
from whale_nebula.runtime.exchange import coding
from whale_nebula.runtime.exchange.coding import Payload, payload_bytes, read
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
        data = payload_bytes(Payload(made.data), zstd=self.way.zstd)
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


Range = tuple[int, int]


@dataclass(frozen=True)
class Flat:
    """These variables, one after another.

    >>> one, two = tf.Variable([[1.0, 2.0]]), tf.Variable([3.0, 4.0])
    >>> flat = Flat((one, two))
    >>> flat.write((1, 3), np.float32([7.0, 8.0]))
    >>> flat.read((0, flat.total)).tolist(), one.numpy().tolist()
    ([1.0, 7.0, 8.0, 4.0], [[1.0, 7.0]])
    """

    variables: Sequence[Any]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(math.prod(variable.shape) for variable in self.variables))

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return self._ends[-1] if self._ends else 0

    def read(self, where: Range) -> Numbers:
        """The numbers of a range, as they are now: an array of its own."""
        found = np.empty(where[1] - where[0], np.float32)
        for variable, inside, outside in self._parts(where):
            found[outside] = variable.numpy().reshape(-1)[inside]
        return found

    def write(self, where: Range, numbers: Numbers) -> None:
        """Put these numbers there."""
        for variable, inside, outside in self._parts(where):
            whole = np.array(variable.numpy()).reshape(-1)
            whole[inside] = numbers[outside]
            variable.assign(tf.reshape(tf.convert_to_tensor(whole), variable.shape))

    def add(self, where: Range, numbers: Numbers) -> None:
        """Add these numbers to what is there."""
        self.write(where, self.read(where) + numbers)

    def _parts(self, where: Range) -> Iterator[tuple[Any, slice, slice]]:
        """The variables that a range touches: which of their numbers, and which of the range's these are."""
        begin, end = where
        for variable, stop in zip(self.variables, self._ends, strict=True):
            start = stop - math.prod(variable.shape)
            first, last = max(begin, start), min(end, stop)
            if first < last:
                yield variable, slice(first - start, last - start), slice(first - begin, last - begin)


_SEEDS = "seed_generator_state"


_STRIDE = 0x3779B9  # between the seeds of two clusters


def weights_of(program: Program, variables: Mapping[str, Any], models: Iterable[Any]) -> Mapping[str, Any]:
    """What is trained, and the averages that layers of these models keep of their batches; in the order of their paths.

    What an optimizer remembers stays where it is, and so do metrics.
    """
    asked_for = {op for request in program.requests for op in request.origins}
    trained = {program.variable_ops[op].path for op in asked_for & program.variable_ops.keys()}
    kept = {id(_plain(each)) for model in models for each in model.non_trainable_weights}
    asked = {path for path, variable in variables.items() if path in trained or id(variable) in kept}
    return {path: variables[path] for path in sorted(asked) if variables[path].dtype.is_floating}


def seeds_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The seeds that dropout draws by."""
    return {path: v for path, v in variables.items() if path.endswith(_SEEDS) and v.shape.rank == 1}


def sow(variables: Mapping[str, Any], place: int) -> None:
    """Let the dropout of the cluster with this place draw other numbers than that of the first."""
    for variable in seeds_of(variables).values() if place else ():
        first = tf.one_hot(0, variable.shape[0], dtype=variable.dtype)
        variable.assign_add(first * tf.cast(place * _STRIDE, variable.dtype))


def _plain(variable: Any) -> Any:
    """TensorFlow's own variable behind one of Keras's."""
    return getattr(variable, "value", variable)
