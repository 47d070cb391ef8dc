"""Parts in one buffer: what was joined is split again, and nothing else is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec.packing import Part, join, split
from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import DTYPE_NAMES

NUMPY = [name for name in DTYPE_NAMES if name != "bfloat16"]
ARRAYS = hnp.arrays(st.sampled_from(NUMPY), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))


def parts_of(arrays: list[np.ndarray]) -> list[Part]:
    return [Part(array.dtype.name, array.shape) for array in arrays]


@settings(deadline=None, max_examples=40)
@given(st.lists(ARRAYS, max_size=4))
def test_what_was_joined_is_split_again_bit_for_bit(arrays: list[np.ndarray]) -> None:
    buffer = join(arrays)
    again = split(buffer, parts_of(arrays))
    assert buffer.size == sum(array.nbytes for array in arrays) == sum(part.nbytes for part in parts_of(arrays))
    assert parts_of(again) == parts_of(arrays)
    assert [each.tobytes() for each in again] == [each.tobytes() for each in arrays]


@settings(deadline=None, max_examples=40)
@given(st.lists(ARRAYS, max_size=3), st.binary(max_size=40))
def test_any_other_length_is_refused(arrays: list[np.ndarray], data: bytes) -> None:
    parts = parts_of([np.zeros_like(array) for array in arrays if array.dtype != np.bool_])
    buffer = np.frombuffer(data, np.uint8)
    if buffer.size == sum(part.nbytes for part in parts):
        assert len(split(buffer, parts)) == len(parts)
    else:
        with pytest.raises(RemoteProtocolError, match="were due"):
            split(buffer, parts)


def test_order_and_byte_order_are_those_of_rows_and_little_ends() -> None:
    matrix = np.arange(6, dtype=">u2").reshape(2, 3)
    assert join([matrix.T]).tolist() == [0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0]
    assert join([matrix, matrix]).size == 24


def test_parts_are_views_of_the_buffer() -> None:
    buffer = join([np.zeros(3, np.uint8), np.ones(2, np.float32)])
    assert all(np.shares_memory(part, buffer) for part in split(buffer, [Part("uint8", (3,)), Part("float32", (2,))]))


def test_a_size_beyond_memory_is_only_a_wrong_length() -> None:
    with pytest.raises(RemoteProtocolError, match="3 bytes came where 8796093022208 were due"):
        split(np.zeros(3, np.uint8), [Part("float64", (2**20, 2**20))])


def test_a_bool_that_is_neither_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="neither 0 nor 1"):
        split(np.array([0, 2], np.uint8), [Part("bool", (2,))])


def test_a_type_that_cannot_cross_is_no_part() -> None:
    with pytest.raises(LocalProtocolError, match="object"):
        join([np.array([None])])
    with pytest.raises(LocalProtocolError, match="'string'"):
        split(np.zeros(3, np.uint8), [Part("string", (3,))])
