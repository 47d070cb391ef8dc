"""The plainest way to cut a model: each cluster gets as many layers as the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whale_nebula.feed.rows import sizes

from .partition import Place, checked_clusters, layers_in_sequence, place_map


def halves(model: Any, clusters: Iterable[str]) -> Place:
    """A `place` map that cuts a model's sequence of layers into parts of equal number.

    Three clusters get thirds; where the number does not divide, the first parts have one layer more.

    >>> import keras
    >>> model = keras.Sequential([keras.layers.Dense(8, name=name) for name in "abc"])
    >>> halves(model, ["gpu", "npu"])
    {'(a|b)(/.*)?': 'gpu', '(c)(/.*)?': 'npu'}
    """
    layers = layers_in_sequence(model)
    names = checked_clusters(clusters, layers)
    left = iter(layers)
    parts = [[next(left).path for _ in range(count)] for count in sizes(len(layers), len(names))]
    return place_map(names, parts)
