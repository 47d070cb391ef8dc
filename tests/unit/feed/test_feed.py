"""Cutting a batch: sizes, slices, shares, and telling one batch from another."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import BatchAxisError
from whale_nebula.feed.batch import cut, micro_batches, rows_of
from whale_nebula.feed.checks import fingerprints
from whale_nebula.feed.rows import sizes
from whale_nebula.ir.program import Leaf
from whale_nebula.spec import Spec

X = Leaf(0, "x", Spec("float32", (None, 2)))
TABLE = Leaf(1, "table", Spec("float32", (5,)), batched=False)


@given(st.integers(1, 500), st.integers(1, 64))
def test_sizes_cover_all_rows_and_differ_by_one(rows: int, count: int) -> None:
    found = sizes(rows, count)
    assert sum(found) == rows
    assert len(found) == min(rows, count)
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


def test_slices_are_the_batch_in_order() -> None:
    x = tf.reshape(tf.range(14.0), [7, 2])
    batch = cut([X, TABLE], [x, tf.zeros(5)], [3, 2, 2])
    assert np.array_equal(np.concatenate([piece[0] for piece in batch.slices]), x)
    assert all(piece[1].shape == (5,) for piece in batch.slices)
    assert [float(share) for share in batch.shares] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert [float(s * g) for s, g in zip(batch.shares, batch.grows, strict=True)] == pytest.approx([1.0] * 3)


def test_a_leaf_that_is_no_batch_is_named_with_the_mend() -> None:
    other = Leaf(1, "table", Spec("float32", (None,)))
    with pytest.raises(BatchAxisError, match="'table' has 5 rows, and 'x' has 7") as caught:
        rows_of([X, other], [tf.zeros([7, 2]), tf.zeros(5)])
    assert "whole=('table',)" in caught.value.mend


def test_one_micro_batch_asks_nothing_of_the_leaves() -> None:
    other = Leaf(1, "table", Spec("float32", (None,)))
    assert micro_batches([X, other], [tf.zeros([7, 2]), tf.zeros(5)], 1) == [7]


def test_fewer_rows_than_micro_batches() -> None:
    assert micro_batches([X], [tf.zeros([2, 2])], 5) == [1, 1]


@given(st.integers(0, 13), st.floats(allow_nan=False, width=32))
def test_one_changed_number_changes_the_fingerprint(at: int, value: float) -> None:
    x = np.arange(14, dtype="float32")
    y = x.copy()
    y[at] = value
    same = x.tobytes() == y.tobytes()
    assert (fingerprints([X], [x]) == fingerprints([X], [y])) is same


def test_strings_have_a_fingerprint_too() -> None:
    texts = [np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object)]
    assert fingerprints([X], [texts[0]]) != fingerprints([X], [texts[1]])
