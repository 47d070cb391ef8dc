"""Paths are names from the model to the layer, however the model was built."""

from typing import Any

import keras

from whale_nebula.capture.placed import spots

layers = keras.layers


class Cell(layers.Layer):
    def __init__(self, *inside: Any, **options: Any) -> None:
        super().__init__(**options)
        self.inside = list(inside)


def paths(model: Any) -> list[str]:
    return [spot.path for spot in spots(model)]


def test_inputs_are_left_out_and_what_is_inside_comes_after() -> None:
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a")], name="inner")
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1, name="b")(inner(inputs)))
    assert paths(model) == ["inner", "inner/a", "b"]


def test_they_do_not_depend_on_what_is_built() -> None:
    model = keras.Sequential([layers.Dense(2, name="a"), layers.Dropout(0.1, name="drop")], name="model")
    before = paths(model)
    model.build((None, 2))
    assert paths(model) == before == ["a", "drop"]
    assert [layer.path for layer in model.layers] != before


def test_neighbours_of_one_name_are_told_apart() -> None:
    assert paths(Cell(*(layers.Dense(2, name="dense") for _ in range(3)))) == ["dense", "dense#2", "dense#3"]


def test_a_shared_layer_stands_in_each_of_its_places_and_a_circle_ends() -> None:
    shared = layers.Dense(2, name="shared")
    first, second = Cell(shared, name="first"), Cell(shared, name="second")
    model = Cell(first, second, name="model")
    first.around = model
    found = list(spots(model))
    assert [spot.path for spot in found] == ["first", "first/shared", "second", "second/shared"]
    assert [spot.around for spot in found] == ["", "first", "", "second"]
    assert found[1].layer is found[3].layer
    assert found[3].parent is second
