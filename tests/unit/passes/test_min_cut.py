"""The cheapest cut of a network, compared with all cuts of small ones."""

import itertools
import random

import pytest

from whale_nebula.passes.label import FREELY, far_side

Edges = dict[tuple[object, object], int]


def _cost(edges: Edges, far: set[object]) -> int:
    return sum(size for (start, end), size in edges.items() if start not in far and end in far)


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_is_cheaper_and_none_as_cheap_is_smaller(seed: int) -> None:
    drawn = random.Random(seed)
    inner = list(range(5))
    nodes = ["s", *inner, "t"]
    pairs = [pair for pair in itertools.permutations(nodes, 2) if pair[0] != "t" and pair[1] != "s"]
    edges: Edges = {pair: drawn.randint(0, 9) for pair in pairs if drawn.random() < 0.5}
    found = far_side(edges, "s", "t")
    cuts = [{"t", *chosen} for n in range(6) for chosen in itertools.combinations(inner, n)]
    least = min(_cost(edges, cut) for cut in cuts)
    assert _cost(edges, found & {*inner, "t"}) == least
    assert found <= set.intersection(*(cut for cut in cuts if _cost(edges, cut) == least))


def test_an_edge_that_is_never_cut_holds_its_ends_together() -> None:
    assert far_side({("s", 1): 3, (1, 2): FREELY, (2, "t"): 5}, "s", "t") == {1, 2, "t"}
    assert far_side({("s", 1): 5, (1, 2): FREELY, (2, "t"): 3}, "s", "t") == {"t"}


def test_a_network_without_edges_has_nothing_to_part() -> None:
    assert far_side({}, "s", "t") == {"t"}
