"""Variables as one row of float32 numbers, of which any range can be read and written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.ir.outer_optimizer import Numbers

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
