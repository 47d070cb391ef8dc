"""What the strategies share: a model's layers in their sequence, and the `place` map of a way to cut it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import OptionError, PlacementError

if TYPE_CHECKING:
    from whale_nebula.capture.placed import Spot

Place = dict[str, str]
"""Regex of layer paths to cluster, as `nb.place` takes it: the whole path must match."""


def layers_in_sequence(model: Any) -> list[Spot]:
    """The layers directly inside a model with their paths, inputs left out, in the order in which they were added.

    That is the order in which they run in a Sequential or functional model, and mostly in others: where it is not,
    planning says which layer feeds an earlier one.
    """
    from whale_nebula.capture.placed import spots  # a model brings TensorFlow with it

    layers = [spot for spot in spots(model) if spot.parent is model] if hasattr(model, "layers") else []
    if not layers:
        raise PlacementError(
            f"model {getattr(model, 'name', model)!r} has no layers to place",
            why="a subclassed model has layers once its __init__ has made them",
            mend="give a Keras model with layers",
        )
    return layers


def checked_clusters(clusters: Iterable[str], layers: Sequence[object]) -> list[str]:
    """The clusters' names, each once, and not more than there are layers."""
    names = [clusters] if isinstance(clusters, str) else list(clusters)
    if not names or len(set(names)) != len(names):
        raise OptionError(f"clusters={names!r}", why="it lists clusters, each once", mend='["gpu", "npu"]')
    if len(names) > len(layers):
        raise PlacementError(
            f"{len(layers)} layers cannot be cut into {len(names)} parts",
            why="every cluster needs a layer at least",
            mend=f"name at most {len(layers)} clusters",
        )
    return names


def place_map(clusters: Sequence[str], parts: Sequence[Sequence[str]]) -> Place:
    r"""The map that gives each cluster the layers with its paths, and everything inside them.

    >>> place_map(["gpu", "npu"], [["in", "a.b"], ["out"]])
    {'(in|a\\.b)(/.*)?': 'gpu', '(out)(/.*)?': 'npu'}
    """
    patterns = ["|".join(map(re.escape, part)) for part in parts]
    return {f"({pattern})(/.*)?": cluster for pattern, cluster in zip(patterns, clusters, strict=True)}
