"""The largest numbers of each row, and their positions as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec.structures import find_largest, gather, pack_positions, packed_bytes, scatter, unpack_positions
from whale_nebula.errors import RemoteProtocolError

ANY_FLOAT = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf])),
)


def find_largest_by_sorting(x: np.ndarray, k: int) -> list[list[int]]:
    """The same by Python's sort, which keeps the order of equal ones."""

    def size(value: float) -> tuple[bool, float]:
        return (True, 0.0) if np.isnan(value) else (False, abs(value))

    ranked = [sorted(range(len(row)), key=lambda i, row=row: size(row[i]), reverse=True) for row in x.tolist()]
    return [sorted(order[:k]) for order in ranked]


@given(ANY_FLOAT, st.data())
def test_find_largest_agrees_with_sorting(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, x.shape[1]))
    positions = find_largest(tf.constant(x), k)
    assert (positions.dtype, positions.shape) == (np.int32, (len(x), k))
    assert positions.tolist() == find_largest_by_sorting(x, k)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_find_largest_keeps_the_element_type(dtype: tf.DType) -> None:
    x = tf.constant([[1.0, -3.0, 2.0, 0.5]], dtype)
    positions = find_largest(x, 2)
    assert positions.tolist() == [[1, 2]]
    values = gather(x, positions)
    assert (values.dtype, scatter(values, positions, 4).dtype) == (dtype, dtype)


def test_find_largest_compares_in_float64() -> None:
    assert find_largest(tf.constant([[1.0, 1.0 + 1e-12]], tf.float64), 1).tolist() == [[1]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 8), st.integers(1, 30), st.data())
def test_scatter_is_zero_at_other_positions(m: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    x = np.random.default_rng(n).standard_normal((m, n)).astype(np.float32)
    positions = find_largest(tf.constant(x), k)
    back = scatter(gather(tf.constant(x), positions), positions, n).numpy()
    keeps = np.zeros((m, n), bool)
    np.put_along_axis(keeps, positions.astype(np.int64), True, axis=1)
    assert back.tolist() == np.where(keeps, x, 0).tolist()


SIZES = st.tuples(st.integers(0, 6), st.integers(0, 70), st.floats(0, 1)) | st.tuples(
    st.integers(0, 3), st.sampled_from([4095, 4096, 4097, 9000]), st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0])
)


def draw_positions(m: int, n: int, k: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((m, n)).argsort(axis=1)
    return np.sort(order[:, :k], axis=1).astype(np.int32)


@given(SIZES, st.integers(0, 1000))
def test_positions_round_trip(sizes: tuple[int, int, float], seed: int) -> None:
    m, n, fraction = sizes
    k = round(fraction * n)
    positions = draw_positions(m, n, k, seed)
    data = pack_positions(positions, n)
    assert (data.dtype, data.shape) == (np.uint8, (packed_bytes(m, n, k),))
    back = unpack_positions(data, m, n, k)
    assert (back.dtype, back.shape) == (np.int32, (m, k))
    assert (back == positions).all()


@given(st.integers(0, 10_000), st.integers(1, 4096), st.data())
def test_packed_bytes_are_of_the_smaller_form(m: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    assert packed_bytes(m, n, k) == min(-(-m * n // 8), -(-m * k * 12 // 8))


def test_positions_at_chunk_borders() -> None:
    positions = np.array([[0, 4095, 4096, 8191, 8192, 12287], [4096, 4097, 4098, 4099, 4100, 4101]], np.int32)
    data = pack_positions(positions, 12288)
    assert data.size == 2 * 2 * 2 + 18
    assert unpack_positions(data, 2, 12288, 6).tolist() == positions.tolist()


@given(st.integers(1, 4), st.sampled_from([(16, 5), (64, 2), (100, 7), (4100, 3)]), st.data())
def test_unpack_positions_accepts_only_packed_form(m: int, nk: tuple[int, int], data: st.DataObject) -> None:
    """Whatever is let through is what `pack` would have made: no two texts for one thing."""
    n, k = nk
    size = packed_bytes(m, n, k)
    base = bytearray(pack_positions(draw_positions(m, n, k), n).tobytes())
    for _ in range(data.draw(st.integers(0, 3))):
        base[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    strange = np.frombuffer(bytes(base), np.uint8)
    try:
        positions = unpack_positions(strange, m, n, k)
    except RemoteProtocolError:
        return
    assert ((positions >= 0) & (positions < n)).all()
    assert (np.diff(positions, axis=1) > 0).all()
    assert pack_positions(positions, n).tobytes() == bytes(base)


def change_byte(positions: list[list[int]], n: int, at: int, value: int) -> np.ndarray:
    data = pack_positions(np.array(positions), n).copy()
    data[at] = value
    return data


@pytest.mark.parametrize(
    ("data", "sizes", "message"),
    [
        (np.zeros(3, np.uint8), (1, 16, 3), "3 bytes, expected 2"),
        (np.zeros(0, np.uint8), (1, 16, 3), "0 bytes, expected"),
        (change_byte([[0, 1, 2]], 16, 0, 0b1011_0010), (1, 16, 3), "different number"),
        (change_byte([[0, 1, 2]], 12, 1, 0b1000_0000), (1, 12, 3), "after the last column"),
        (change_byte([[5]], 100, 0, 100), (1, 100, 1), "after the last column"),
        (change_byte([[5]], 100, 1, 0x10), (1, 100, 1), "after the last index"),
        (change_byte([[5, 6]], 100, 0, 6), (1, 100, 2), "not in ascending order"),
        (change_byte([[5, 6]], 100, 0, 7), (1, 100, 2), "not in ascending order"),
        (change_byte([[5, 4097]], 5000, 0, 3), (1, 5000, 2), "chunks of a row hold more"),
        (change_byte([[5, 4097]], 5000, 0, 0), (1, 5000, 2), "after|ascend"),
        (change_byte([[4090, 4097]], 5000, 0, 0), (1, 5000, 2), "after the last column"),
    ],
)
def test_unpack_positions_refuses_invalid_data(data: np.ndarray, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        unpack_positions(data, *sizes)
