"""Whole numbers by their frequencies: they come back, in about as many bits as there is to tell."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec import entropy_coding
from whale_nebula.errors import RemoteProtocolError

LARGEST = st.sampled_from([0, 1, 3, 7, 127, 128, 32767])


@given(st.data(), LARGEST)
@settings(max_examples=80, deadline=None)
def test_whatever_is_packed_comes_back(data: st.DataObject, most: int) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=70))
    numbers = data.draw(hnp.arrays("int16", shape, elements=st.integers(-most, most)))
    packed = entropy_coding.pack(numbers)
    again, used = entropy_coding.unpack(np.append(packed, np.uint8(7)), *shape)
    np.testing.assert_array_equal(again, numbers)
    assert used == packed.size


@pytest.mark.parametrize(
    ("deviation", "more"), [(0.15, 0.05), (0.25, 0.12), (0.4, 0.1), (1.0, 0.07), (3.0, 0.05), (20.0, 0.05)]
)
def test_numbers_take_little_more_than_their_entropy(deviation: float, more: float) -> None:
    numbers = np.rint(np.random.default_rng(0).normal(size=(4000, 64)) * deviation).astype(np.int16)
    shares = np.unique(numbers, return_counts=True)[1] / numbers.size
    entropy = -(shares * np.log2(shares)).sum()
    assert entropy < 8 * entropy_coding.pack(numbers).size / numbers.size < entropy + more


def test_each_group_of_columns_has_its_own_frequencies() -> None:
    drawn = np.random.default_rng(0).normal(size=(4000, 64))
    sizes = np.geomspace(8, 1 / 8, 64)
    apart, mixed = (np.rint(drawn * each).astype(np.int16) for each in (sizes, sizes.reshape(8, 8).T.reshape(-1)))
    assert entropy_coding.pack(apart).size < 0.85 * entropy_coding.pack(mixed).size


def test_what_is_no_packed_matrix_is_refused() -> None:
    good = entropy_coding.pack(np.eye(16, dtype=np.int16))
    for bad in (
        good[:-1],  # the last group ends early
        good[:3],
        np.concatenate([good[:2], np.array([255, 255, 255, 255], np.uint8), good[6:]]),
        _with(good, 0, 3),  # symbols of three numbers
        _with(good, 1, 127),  # eight numbers of 255 values in a byte
        _with(good, 6, 0xFF),  # no deflated bytes
    ):
        with pytest.raises(RemoteProtocolError):
            entropy_coding.unpack(bad, 16, 16)


def test_no_more_is_opened_than_was_due() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    made = bomb.compress(bytes(50_000_000)) + bomb.flush()
    with pytest.raises(RemoteProtocolError, match="the 9 bytes that were due"):
        entropy_coding.inflate(made, 9)


def test_a_symbol_beyond_its_group_is_refused() -> None:
    body = entropy_coding.deflate(bytes([3] * 8))  # of three values, one number a symbol
    data = np.frombuffer(bytes([1, 1]) + len(body).to_bytes(4, "little") + body, np.uint8)
    with pytest.raises(RemoteProtocolError, match="larger than its group's"):
        entropy_coding.unpack(data, 1, 8)


def _with(data: np.ndarray, place: int, value: int) -> np.ndarray:
    changed = data.copy()
    changed[place] = value
    return changed
