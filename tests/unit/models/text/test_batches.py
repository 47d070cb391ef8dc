"""Batches: padding to few lengths, the same rows in every cluster, and a model that learns from them."""

from collections.abc import Sequence

import numpy as np
import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.text import (
    Encoded,
    Ids,
    Order,
    batches,
    make_order,
)


def rows_of(lengths: Sequence[int]) -> Ids:
    """Each row from 2 to 3, its words all the number of the row, from 10 on."""
    return Ids.of_rows([[2, *[10 + row] * (length - 2), 3] for row, length in enumerate(lengths)])


SOURCE, TARGET = rows_of([5, 9, 12, 3, 8]), rows_of([8, 9, 17, 3, 6])
BOTH = Encoded(SOURCE, TARGET)
ORDER = make_order(5, batch=2, seed=4, epochs=2)


def test_batches_follow_the_order_on_both_sides() -> None:
    for rows, (inputs, labels, weights) in zip(ORDER.batches, batches(BOTH, ORDER, weights=True), strict=True):
        assert inputs["source"][:, 1].numpy().tolist() == [10 + row for row in rows]
        assert inputs["target"][:, 0].numpy().tolist() == [2] * len(rows)
        assert labels[:, 0].numpy().tolist() == [10 + row for row in rows]
        np.testing.assert_array_equal(inputs["target"][:, 1:], labels[:, :-1])
        np.testing.assert_array_equal(weights, labels.numpy() != 0)
    assert int(batches(BOTH, ORDER).cardinality()) == len(ORDER) == 6


def test_batch_lengths_are_the_smallest_multiples_of_eight() -> None:
    order = Order(5, 1, ((0, 1), (2,), (3, 4)))
    found = list(batches(BOTH, order))
    shapes = [(inputs["source"].shape[1], inputs["target"].shape[1], labels.shape[1]) for inputs, labels in found]
    assert shapes == [(16, 8, 8), (16, 16, 16), (8, 8, 8)]


def test_padding_does_not_exceed_the_model_length() -> None:
    short = Encoded(Ids.of_rows([[2, 9, 3]], longest=5), Ids.of_rows([[2, 9, 9, 9, 3]], longest=5))
    ((inputs, labels),) = batches(short, make_order(1, batch=1))
    assert (inputs["source"].shape, inputs["target"].shape, labels.shape) == ((1, 5), (1, 5), (1, 5))


@pytest.mark.parametrize("weights", [pytest.param(False, marks=pytest.mark.grid), True])
def test_absent_side_is_none_and_present_side_is_unchanged(weights: bool) -> None:
    whole = list(batches(BOTH, ORDER, weights=weights))
    left = list(batches(Encoded(source=SOURCE), ORDER, weights=weights))
    right = list(batches(Encoded(target=TARGET), ORDER, weights=weights))
    for all_here, of_source, of_target in zip(whole, left, right, strict=True):
        assert len(all_here) == len(of_source) == len(of_target) == 2 + weights
        assert of_source[0]["target"] is None
        assert all(each is None for each in of_source[1:])
        assert of_target[0]["source"] is None
        np.testing.assert_array_equal(of_source[0]["source"], all_here[0]["source"])
        np.testing.assert_array_equal(of_target[0]["target"], all_here[0]["target"])
        np.testing.assert_array_equal(of_target[1], all_here[1])


@pytest.mark.parametrize("side", ["source", "target"])
def test_order_of_a_different_size_is_refused(side: str) -> None:
    with pytest.raises(DataError, match=f"an order of 6 rows does not match 5 {side} sentences"):
        batches(Encoded(**{side: SOURCE}), make_order(6, batch=2))  # type: ignore[arg-type]


def test_zero_multiple_is_refused() -> None:
    with pytest.raises(OptionError, match="multiple=0"):
        batches(BOTH, ORDER, multiple=0)
