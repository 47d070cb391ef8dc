"""Division of a batch: sizes, slices, shares, rows that are read, absent inputs, and fingerprints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import AbsentInputError, BatchAxisError
from whale_nebula.feed.checks import MissingInput, compute_fingerprints
from whale_nebula.feed.inputs import count_micro_batch_rows, count_rows, divide_batch
from whale_nebula.feed.rows import AllRows, Feed, Within, WorkerRows, divide_rows, select_own_rows
from whale_nebula.ir.program import Leaf
from whale_nebula.ir.routing import Routing
from whale_nebula.spec import Spec

X = Leaf(0, "x", Spec("float32", (None, 2)))
TABLE = Leaf(1, "table", Spec("float32", (5,)), batched=False)


@given(st.integers(1, 500), st.integers(1, 64))
def test_micro_batch_sizes_cover_all_rows_and_differ_by_one(rows: int, count: int) -> None:
    found = divide_rows(rows, count)
    assert sum(found) == rows
    assert len(found) == min(rows, count)
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


def test_micro_batches_are_slices_in_order() -> None:
    x = tf.reshape(tf.range(14.0), [7, 2])
    batch = divide_batch([X, TABLE], [x, tf.zeros(5)], [3, 2, 2])
    assert np.array_equal(np.concatenate([piece[0] for piece in batch.slices]), x)
    assert all(piece[1].shape == (5,) for piece in batch.slices)
    assert [float(share) for share in batch.shares] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert [float(s * g) for s, g in zip(batch.shares, batch.grows, strict=True)] == pytest.approx([1.0] * 3)


def test_input_with_other_rows_is_refused_with_a_fix() -> None:
    other = Leaf(1, "table", Spec("float32", (None,)))
    with pytest.raises(BatchAxisError, match="'table' has 5 rows, and 'x' has 7") as caught:
        count_rows([X, other], [tf.zeros([7, 2]), tf.zeros(5)])
    assert "whole=('table',)" in caught.value.mend


def test_single_micro_batch_allows_different_rows() -> None:
    other = Leaf(1, "table", Spec("float32", (None,)))
    assert count_micro_batch_rows([X, other], [tf.zeros([7, 2]), tf.zeros(5)], 1) == [7]


def test_fewer_rows_than_micro_batches_reduce_their_number() -> None:
    assert count_micro_batch_rows([X], [tf.zeros([2, 2])], 5) == [1, 1]


@given(st.integers(0, 13), st.floats(allow_nan=False, width=32))
def test_changed_number_changes_the_fingerprint(at: int, value: float) -> None:
    x = np.arange(14, dtype="float32")
    y = x.copy()
    y[at] = value
    same = x.tobytes() == y.tobytes()
    assert (compute_fingerprints([X], [x]) == compute_fingerprints([X], [y])) is same


def test_strings_have_fingerprints() -> None:
    texts = [np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object)]
    assert compute_fingerprints([X], [texts[0]]) != compute_fingerprints([X], [texts[1]])


def create_row_rules(workers: int, micro_batch: int, order: tuple[int, ...] = ()) -> list[WorkerRows]:
    """What each worker of a cluster reads for its one stage."""
    names = tuple(f"gpu/{number}" for number in range(workers))
    routing = Routing((names,), (order,) if order else ())
    return [WorkerRows(micro_batch, routing, name, frozenset({0})) for name in names]


@given(st.integers(0, 70), st.integers(1, 12), st.integers(1, 5))
def test_row_is_read_by_exactly_one_worker(rows: int, micro_batch: int, workers: int) -> None:
    found = np.array([each.select(rows) for each in create_row_rules(workers, micro_batch)])
    assert found.shape == (workers, rows) and (found.sum(axis=0) == 1).all()


@given(st.integers(1, 70), st.integers(1, 12), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_shares_of_workers_follow_the_routing(rows: int, micro_batch: int, order: list[int]) -> None:
    counts = divide_rows(rows, micro_batch)
    for number, each in enumerate(create_row_rules(3, micro_batch, tuple(order))):
        own = sum(count for m, count in enumerate(counts) if order[m % len(order)] == number)
        assert int(each.select(rows).sum()) == own


def test_worker_reads_the_rows_of_all_its_stages() -> None:
    routing = Routing((("a/0", "a/1"), ("a/1",)))
    both = WorkerRows(4, routing, "a/1", frozenset({0, 1}))
    assert both.select(4).all()
    assert not WorkerRows(4, routing, "a/0", frozenset({1})).select(4).any()


def test_rows_of_several_steps_are_combined() -> None:
    first, second = create_row_rules(2, 2)
    assert select_own_rows([first, second], 6).all() and select_own_rows([], 6).all()
    assert select_own_rows([first], 6).tolist() == [True] * 3 + [False] * 3
    assert select_own_rows([first, AllRows()], 6).all()


def test_indivisible_batch_is_read_whole() -> None:
    def span(name: str, count: int) -> tuple[int, int]:
        raise BatchAxisError("too few")

    feed = Feed(frozenset({Within(AllRows(), span, "gpu")}))
    assert feed.select_rows(1).tolist() == [True]


LEAVES = [Leaf(0, "x/source", Spec("float32", (None, 2))), Leaf(1, "x/target", Spec("int32", (None, None)))]
ABSENT = MissingInput("x/target", tf.TensorSpec([None, None], tf.int32))
TENSORS = [tf.reshape(tf.range(10.0), [5, 2]), ABSENT]
READS = {
    "numpy": np.asarray,
    "tensor": tf.convert_to_tensor,
    "add": lambda gone: tf.add(gone, 1),
    "split": lambda gone: tf.split(gone, 2),
    "cast": lambda gone: tf.cast(gone, tf.float32),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_an_absent_input_raises(read: Any) -> None:
    with pytest.raises(AbsentInputError, match="'x/target' is None in this process"):
        read(ABSENT)


@pytest.mark.parametrize("count", [1, 2])
def test_row_count_comes_from_present_inputs(count: int) -> None:
    counts = count_micro_batch_rows(LEAVES, TENSORS, count)
    batch = divide_batch(LEAVES, TENSORS, counts)
    assert counts == {1: [5], 2: [3, 2]}[count]
    assert all(each[1] is ABSENT for each in batch.slices)
    assert batch.fill_rows().whole[1].shape[0] == 5
    assert [each[1].shape[0] for each in batch.fill_rows().slices] == counts
    assert all(each[0] is again[0] for each, again in zip(batch.slices, batch.fill_rows().slices, strict=True))


def test_batch_without_absent_inputs_is_unchanged() -> None:
    batch = divide_batch(LEAVES[:1], TENSORS[:1], [5])
    assert batch.fill_rows() is batch


@pytest.mark.parametrize("count", [1, 2])
def test_step_without_any_input_is_refused(count: int) -> None:
    with pytest.raises(AbsentInputError, match="all inputs of this step are None in this process: 'x/target'"):
        count_micro_batch_rows(LEAVES[1:], TENSORS[1:], count)


def test_absent_and_secret_inputs_have_no_fingerprint() -> None:
    assert set(compute_fingerprints(LEAVES, TENSORS)) == {"x/source"}
    assert set(compute_fingerprints(LEAVES, TENSORS, secret=["x/source"])) == set()
    assert set(compute_fingerprints(LEAVES, TENSORS, only=["x/target"])) == set()
