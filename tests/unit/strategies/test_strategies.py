"""Strategies cut a model's sequence of layers: every layer once, in order, evenly by their own measure."""

import itertools
import re

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError, PlacementError
from whale_nebula.models import Sizes, transformer
from whale_nebula.strategies import by_parameters, halves
from whale_nebula.strategies.partition import _cut_weights

BOTH = pytest.mark.parametrize("strategy", [halves, by_parameters])


def chain(*widths: int) -> keras.Sequential:
    """Dense layers of these widths; 0 stands for an Activation, which has no parameters."""
    layers = [
        keras.layers.Dense(width, name=f"l{n}") if width else keras.layers.Activation("relu", name=f"l{n}")
        for n, width in enumerate(widths)
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


def parts(places: dict[str, str], model: keras.Model) -> dict[str, list[str]]:
    """Layer names by cluster, as a place map gives them; every layer must match exactly once."""
    found: dict[str, list[str]] = {cluster: [] for cluster in places.values()}
    for layer in model.layers:
        if not isinstance(layer, keras.layers.InputLayer):
            (cluster,) = [c for pattern, c in places.items() if re.fullmatch(pattern, layer.name)]
            found[cluster].append(layer.name)
    return found


@pytest.mark.parametrize(
    ("strategy", "widths", "clusters", "counts"),
    [
        (halves, (1, 1, 1, 1), "ab", [2, 2]),
        (halves, (1, 1, 1, 1, 1), "abc", [2, 2, 1]),  # where they do not divide the first have more
        (by_parameters, (2, 2, 2, 64), "ab", [3, 1]),
        (by_parameters, (0, 4, 0, 4, 0, 0), "ab", [3, 3]),  # what has none goes with the layer before it
    ],
)
def test_strategies_divide_layers_by_count_or_parameters(
    strategy, widths: tuple[int, ...], clusters: str, counts: list[int]
) -> None:
    model = chain(*widths)
    assert [len(part) for part in parts(strategy(model, list(clusters)), model).values()] == counts


def test_transformer_is_cut_between_blocks() -> None:
    model = transformer(Sizes(vocabulary=20, length=8, width=8, heads=2, blocks=4))
    found = parts(by_parameters(model, ["gpu", "npu"]), model)
    assert found == {"gpu": ["embedding", "block0", "block1"], "npu": ["block2", "block3", "norm", "output"]}


@BOTH
def test_sublayers_go_with_their_layer(strategy) -> None:
    places = strategy(chain(4, 4), ["gpu", "npu"])
    assert [c for p, c in places.items() if re.fullmatch(p, "l0/attention/query")] == ["gpu"]
    assert [c for p, c in places.items() if re.fullmatch(p, "l01")] == []


@BOTH
@pytest.mark.parametrize("clusters", [1, 2, 3, 5])
def test_layers_are_placed_once_and_in_order(strategy, clusters: int) -> None:
    model = chain(3, 1, 4, 1, 5)
    found = parts(strategy(model, [f"c{n}" for n in range(clusters)]), model)
    assert list(itertools.chain(*found.values())) == ["l0", "l1", "l2", "l3", "l4"]
    assert all(found.values())


@BOTH
def test_strategies_do_not_change_the_model(strategy) -> None:
    model = chain(2, 2)
    before = [v.numpy().tolist() for v in model.variables]
    assert strategy(model, ["gpu", "npu"]) == strategy(model, ["gpu", "npu"])
    assert [v.numpy().tolist() for v in model.variables] == before


@BOTH
def test_more_clusters_than_layers_is_refused(strategy) -> None:
    with pytest.raises(PlacementError, match="2 layers cannot be divided into 3 parts"):
        strategy(chain(2, 2), ["a", "b", "c"])


@BOTH
@pytest.mark.parametrize("clusters", [[], ["gpu", "gpu"]])
def test_empty_or_duplicate_clusters_are_refused(strategy, clusters: list[str]) -> None:
    with pytest.raises(OptionError):
        strategy(chain(2, 2), clusters)


@BOTH
def test_single_cluster_can_be_a_string(strategy) -> None:
    assert list(strategy(chain(2, 2), "gpu").values()) == ["gpu"]


@BOTH
def test_model_without_layers_is_refused(strategy) -> None:
    with pytest.raises(PlacementError, match="no layers"):
        strategy(keras.Sequential(), ["gpu"])


def test_by_parameters_refuses_an_unbuilt_model() -> None:
    with pytest.raises(PlacementError, match="not built"):
        by_parameters(keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2)]), ["gpu", "npu"])


class LayersOfEqualName(keras.Model):
    """Two layers of one name, which Keras allows in a subclassed model."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = keras.layers.Dense(2, name="d"), keras.layers.Dense(2, name="d")
        self.one.build((None, 2))
        self.two.build((None, 2))


@BOTH
def test_layers_of_equal_name_are_placed_separately(strategy) -> None:
    assert strategy(LayersOfEqualName(), ["gpu", "npu"]) == {"(d)(/.*)?": "gpu", r"(d\#2)(/.*)?": "npu"}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_cut_minimises_the_heaviest_part(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))

    def heaviest(cuts) -> int:
        ends = [0, *cuts, len(weights)]
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(ends))

    every = itertools.combinations(range(1, len(weights)), count - 1)
    found = _cut_weights(weights, count)
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
    assert found[-1][1] == len(weights)
    assert all(a < b for a, b in found)
    assert max(sum(weights[a:b]) for a, b in found) == min(map(heaviest, every))
