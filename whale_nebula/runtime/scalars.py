"""Which of a step's results are single numbers, and how the user's code names them: its loss and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale_nebula.report.records import Scalars
from whale_nebula.tf import private as tf_private


@dataclass(frozen=True)
class ScalarResults:
    """The places of single numbers among the tensors that a step returns, each with its name.

    A name is the key in a dict, the place in a tuple, and `result` where the step returns nothing else.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]

    def of(self, tensors: Sequence[Any]) -> Scalars:
        """The numbers of one step; none is fetched from its device before it is read."""
        return Scalars(self.names, [tensors[place] for place in self.places])


def scalar_results(structure: Any) -> ScalarResults:
    """Look through what the traced step returns.

    >>> with tf.Graph().as_default():
    ...     found = scalar_results({"loss": tf.constant(1.0), "logits": tf.zeros([2, 2]), "rows": tf.constant(3)})
    >>> found.names
    ('loss', 'rows')
    """
    names, places, place = [], [], 0
    for path, leaf in tf_private.leaf_paths(structure):
        tensors = [part for part in tf.nest.flatten(leaf, expand_composites=True) if isinstance(part, tf.Tensor)]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0 and (leaf.dtype.is_floating or leaf.dtype.is_integer):
            names.append("/".join(map(str, path)) or "result")
            places.append(place)
        place += len(tensors)
    return ScalarResults(tuple(names), tuple(places))


def returned_names(structure: Any) -> tuple[str, ...]:
    """The name of each tensor that the traced step returns: its key, its place, or nothing where it is the only one.

    >>> with tf.Graph().as_default():
    ...     returned_names({"rec": tf.constant(1.0), "more": (tf.constant(2.0), tf.constant(3))})
    ('more/0', 'more/1', 'rec')
    """
    names: list[str] = []
    for path, leaf in tf_private.leaf_paths(structure):
        parts = [part for part in tf.nest.flatten(leaf, expand_composites=True) if isinstance(part, tf.Tensor)]
        names += ["/".join(map(str, path))] * len(parts)
    return tuple(names)
