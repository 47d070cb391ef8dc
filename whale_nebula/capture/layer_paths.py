"""The paths of a model's layers: their names from the outside to the inside, "encoder/block0/attention".

Keras has a `layer.path` too, but that says under which layer something was built first: it is None before that and
for what has no weights, and has the model's name in a Sequential but not in a functional model. The names themselves
are what `model.summary(expand_nested=True)` shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from whale_nebula.tf import private as tf_private


class Spot(NamedTuple):
    """A place where a layer stands; a shared layer has several."""

    path: str
    layer: Any
    parent: Any

    @property
    def around(self) -> str:
        """The path of the layer that holds this one; empty for the model."""
        return self.path.rpartition("/")[0]


def spots(model: Any) -> Iterator[Spot]:
    """All layers inside a model but its inputs, each before those inside it.

    Of two neighbours with one name the second gets a number: "dense", "dense#2".

    >>> import keras
    >>> inner = keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="b")], name="inner")
    >>> [spot.path for spot in spots(keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="c")]))]
    ['inner', 'inner/a', 'inner/b', 'c']
    """
    return _inside(model, "", (model,))


def _inside(parent: Any, prefix: str, around: tuple[Any, ...]) -> Iterator[Spot]:
    numbers: dict[str, int] = {}
    for layer in tf_private.sublayers(parent):
        if isinstance(layer, tf_private.KerasInput) or any(layer is each for each in around):
            continue
        numbers[layer.name] = number = numbers.get(layer.name, 0) + 1
        path = prefix + layer.name + f"#{number}" * (number > 1)
        yield Spot(path, layer, parent)
        yield from _inside(layer, f"{path}/", (*around, layer))
