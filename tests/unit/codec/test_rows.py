"""Padding that is not sent: what the mask marks comes back, and zeros elsewhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec.packing import keep, pack_mask, put_back, unpack_mask
from whale_nebula.errors import LocalProtocolError, RemoteProtocolError

MASKS = hnp.arrays(np.bool_, st.integers(0, 40))


@settings(deadline=None, max_examples=40)
@given(MASKS)
def test_a_mask_crosses_in_a_bit_a_row(mask: np.ndarray) -> None:
    packed = pack_mask(mask)
    assert packed.size == -(-mask.size // 8)
    np.testing.assert_array_equal(unpack_mask(packed, mask.size), mask)


@settings(deadline=None, max_examples=40)
@given(MASKS, st.integers(0, 5), st.sampled_from(["float32", "float16", "int32"]))
def test_marked_rows_come_back_and_the_others_are_zero(mask: np.ndarray, columns: int, dtype: str) -> None:
    matrix = np.arange(1, mask.size * columns + 1).reshape(mask.size, columns).astype(dtype)
    sent = keep(matrix, mask)
    assert sent.shape == (mask.sum(), columns)
    again = put_back(sent, mask)
    assert again.dtype == matrix.dtype
    np.testing.assert_array_equal(again, np.where(mask[:, None], matrix, np.zeros_like(matrix)))


def test_where_all_is_sent_nothing_is_copied() -> None:
    matrix, mask = np.ones((3, 2)), np.ones(3, np.bool_)
    assert keep(matrix, mask) is matrix and put_back(matrix, mask) is matrix


@pytest.mark.parametrize("sent", [np.zeros((1, 2)), np.zeros((3, 2)), np.zeros(())], ids=["fewer", "more", "none"])
def test_rows_that_are_not_those_of_the_mask_are_refused(sent: np.ndarray) -> None:
    with pytest.raises(RemoteProtocolError, match="under a mask that marks 2"):
        put_back(sent, np.array([True, True, False]))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="2 were due"):
        unpack_mask(np.zeros(1, np.uint8), 9)
    with pytest.raises(LocalProtocolError, match="a mask of 2 rows"):
        keep(np.zeros((3, 2)), np.ones(2, np.bool_))


@pytest.mark.parametrize("mask", [np.ones((2, 1), np.bool_), np.ones(2)], ids=["a matrix", "numbers"])
def test_a_mask_is_one_bool_a_row(mask: np.ndarray) -> None:
    for attempt in (lambda: pack_mask(mask), lambda: keep(np.zeros((2, 2)), mask)):
        with pytest.raises(LocalProtocolError, match="one bool for each row"):
            attempt()
