"""What the strategies share: a model's layers in their sequence, and the `place` map of a way to cut it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from whale_nebula.errors import OptionError, PlacementError

Place = dict[str, str]
"""Regex of layer paths to cluster, as `nb.place` takes it: the whole path must match."""


def layers_in_sequence(model: Any) -> list[Any]:
    """The layers directly inside a model, inputs left out, in the order in which they were added."""
    layers = [layer for layer in getattr(model, "layers", ()) if type(layer).__name__ != "InputLayer"]
    if not layers:
        raise PlacementError(
            f"model {getattr(model, 'name', model)!r} has no layers to place",
            why="a subclassed model has layers once its __init__ has made them",
            mend="give a Keras model with layers",
        )
    return layers


def checked_clusters(clusters: Iterable[str], layers: Sequence[Any]) -> list[str]:
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


def place_map(clusters: Sequence[str], parts: Sequence[Sequence[Any]]) -> Place:
    r"""The map that gives each cluster its part, with everything inside its layers.

    >>> from types import SimpleNamespace as Layer
    >>> place_map(["gpu", "npu"], [[Layer(name="in"), Layer(name="a.b")], [Layer(name="out")]])
    {'(in|a\\.b)(/.*)?': 'gpu', '(out)(/.*)?': 'npu'}
    """
    patterns = ["|".join(re.escape(layer.name) for layer in part) for part in parts]
    return {f"({pattern})(/.*)?": cluster for pattern, cluster in zip(patterns, clusters, strict=True)}
