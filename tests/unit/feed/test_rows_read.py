"""Which rows of a batch a process reads: the workers of a cluster share them out, whatever the numbers are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import BatchAxisError
from whale_nebula.feed.rows import AllRows, Feed, RowsRead, Within, own_rows, sizes
from whale_nebula.ir.routing import Routing


def reads(workers: int, micro_batch: int, order: tuple[int, ...] = ()) -> list[RowsRead]:
    """What each worker of a cluster reads for its one stage."""
    names = tuple(f"gpu/{number}" for number in range(workers))
    routing = Routing((names,), (order,) if order else ())
    return [RowsRead(micro_batch, routing, name, frozenset({0})) for name in names]


@given(st.integers(0, 70), st.integers(1, 12), st.integers(1, 5))
def test_every_row_is_one_workers(rows: int, micro_batch: int, workers: int) -> None:
    found = np.array([each.of(rows) for each in reads(workers, micro_batch)])
    assert found.shape == (workers, rows) and (found.sum(axis=0) == 1).all()


@given(st.integers(1, 70), st.integers(1, 12), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_shares_by_speed_are_those_of_the_routing(rows: int, micro_batch: int, order: list[int]) -> None:
    counts = sizes(rows, micro_batch)
    for number, each in enumerate(reads(3, micro_batch, tuple(order))):
        own = sum(count for m, count in enumerate(counts) if order[m % len(order)] == number)
        assert int(each.of(rows).sum()) == own


def test_two_stages_read_what_either_does() -> None:
    routing = Routing((("a/0", "a/1"), ("a/1",)))
    both = RowsRead(4, routing, "a/1", frozenset({0, 1}))
    assert both.of(4).all()
    assert not RowsRead(4, routing, "a/0", frozenset({1})).of(4).any()


def test_several_steps_read_what_any_of_them_does() -> None:
    first, second = reads(2, 2)
    assert own_rows([first, second], 6).all() and own_rows([], 6).all()
    assert own_rows([first], 6).tolist() == [True] * 3 + [False] * 3
    assert own_rows([first, AllRows()], 6).all()


def test_a_batch_that_cannot_be_shared_out_is_left_to_the_step() -> None:
    def span(name: str, count: int) -> tuple[int, int]:
        raise BatchAxisError("too few")

    feed = Feed(frozenset({Within(AllRows(), span, "gpu")}))
    assert feed.own(1).tolist() == [True]
