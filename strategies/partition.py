"""Placement maps for `nb.place` that divide a model's sequence of layers, by number or by parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import OptionError, PlacementError
from whale_nebula.feed.rows import divide_rows

if TYPE_CHECKING:
    from whale_nebula.capture.layer_placement import LayerPath


Place = dict[str, str]
"""Regex of layer paths to cluster, for `nb.place`: the whole path must match."""


def list_layers(model: Any) -> list[LayerPath]:
    """The direct layers of a model with their paths, without inputs, in the order in which they were added.

    In a Sequential or functional model this is the order of execution, and mostly in other models too; where it is not,
    planning reports which layer feeds an earlier one.
    """
    from whale_nebula.capture.layer_placement import list_layer_paths  # imports TensorFlow, which a model has loaded

    layers = [spot for spot in list_layer_paths(model) if spot.parent is model] if hasattr(model, "layers") else []
    if not layers:
        raise PlacementError(
            f"model {getattr(model, 'name', model)!r} has no layers to place",
            why="the layers of a subclassed model are those that its __init__ creates",
            mend="pass a Keras model with layers",
        )
    return layers


def check_clusters(clusters: Iterable[str], layers: Sequence[object]) -> list[str]:
    """The names of clusters as a list, which must be distinct, and not more than there are layers."""
    names = [clusters] if isinstance(clusters, str) else list(clusters)
    if not names or len(set(names)) != len(names):
        raise OptionError(f"clusters={names!r} is not a list of distinct clusters", mend='["gpu", "npu"]')
    if len(names) > len(layers):
        raise PlacementError(
            f"{len(layers)} layers cannot be divided into {len(names)} parts",
            why="each cluster needs at least one layer",
            mend=f"pass at most {len(layers)} clusters",
        )
    return names


def make_place_map(clusters: Sequence[str], parts: Sequence[Sequence[str]]) -> Place:
    r"""The map that assigns to each cluster the layers with its paths, and everything inside them.

    >>> make_place_map(["gpu", "npu"], [["in", "a.b"], ["out"]])
    {'(in|a\\.b)(/.*)?': 'gpu', '(out)(/.*)?': 'npu'}
    """
    patterns = ["|".join(map(re.escape, part)) for part in parts]
    return {f"({pattern})(/.*)?": cluster for pattern, cluster in zip(patterns, clusters, strict=True)}


def halves(model: Any, clusters: Iterable[str]) -> Place:
    """Create a map for `nb.place` that divides a model's sequence of layers into parts with equal numbers of layers.

    Three clusters get thirds; with a remainder the first parts have one layer more.

    Args:
        model: a Keras model.
        clusters: names of the clusters, in the order of the parts.

    Returns:
        a dict from patterns of layer paths to clusters.

    >>> import keras
    >>> model = keras.Sequential([keras.layers.Dense(8, name=name) for name in "abc"])
    >>> halves(model, ["gpu", "npu"])
    {'(a|b)(/.*)?': 'gpu', '(c)(/.*)?': 'npu'}
    """
    layers = list_layers(model)
    names = check_clusters(clusters, layers)
    left = iter(layers)
    parts = [[next(left).path for _ in range(count)] for count in divide_rows(len(layers), len(names))]
    return make_place_map(names, parts)


def by_parameters(model: Any, clusters: Iterable[str]) -> Place:
    """Create a map for `nb.place` that divides a model's layers so that the part with most parameters is minimal.

    A layer without parameters is in the same part as the layer before it.

    Args:
        model: a built Keras model.
        clusters: names of the clusters, in the order of the parts.

    Returns:
        a dict from patterns of layer paths to clusters.

    >>> import keras
    >>> layers = [keras.layers.Dense(width, name=name) for name, width in {"a": 2, "b": 2, "c": 8}.items()]
    >>> model = keras.Sequential([keras.Input((2,)), *layers])
    >>> by_parameters(model, ["gpu", "npu"])
    {'(a|b)(/.*)?': 'gpu', '(c)(/.*)?': 'npu'}
    """
    groups = _group_layers(list_layers(model))
    names = check_clusters(clusters, groups)
    weights = [sum(_count_parameters(spot.layer) for spot in group) for group in groups]
    cuts = _cut_weights(weights, len(names))
    parts = [[spot.path for group in groups[start:end] for spot in group] for start, end in cuts]
    return make_place_map(names, parts)


def _group_layers(layers: Sequence[LayerPath]) -> list[list[LayerPath]]:
    """The layers in groups: each begins at a layer with parameters, except that the first one begins at the start."""
    groups: list[list[LayerPath]] = [[]]
    is_first = True
    for spot in layers:
        has_parameters = _count_parameters(spot.layer) > 0
        if has_parameters and not is_first:
            groups.append([])
        groups[-1].append(spot)
        is_first = is_first and not has_parameters
    return groups


def _count_parameters(layer: Any) -> int:
    if not layer.built:
        raise PlacementError(
            f"layer {layer.name!r} is not built",
            where=layer.name,
            why="its parameters are counted, and it has none before it is built",
            mend="build the model first: call model.build(shape), or the model once",
        )
    return int(layer.count_params())


def _cut_weights(weights: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut a sequence into `parts` non-empty runs, as pairs of start and end, so that the heaviest is as light as
    possible.

    >>> _cut_weights([5, 1, 1, 5], 2), _cut_weights([1, 1, 1, 9], 3)
    ([(0, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)])
    """

    @cache
    def best(start: int, left: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """The best cut of the rest from `start`: (heaviest run, sum of squares to break ties), and the ends of the
        runs.
        """
        if left == 1:
            weight = sum(weights[start:])
            return (weight, weight * weight), (len(weights),)
        found = []
        for end in range(start + 1, len(weights) - left + 2):
            weight = sum(weights[start:end])
            (heaviest, squares), ends = best(end, left - 1)
            found.append(((max(weight, heaviest), squares + weight * weight), (end, *ends)))
        return min(found)

    ends = best(0, parts)[1]
    return list(zip((0, *ends), ends, strict=False))
