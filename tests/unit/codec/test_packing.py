"""Arrays, masks and whole numbers as bytes: round trips, and refusal of other bytes."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec.packing import (
    SAMPLE_BYTES,
    TYPES,
    Part,
    compress_zstd,
    decompress_zstd,
    join,
    pack,
    scatter_rows,
    select_rows,
    split,
    unpack,
)
from whale_nebula.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import DTYPE_NAMES

NUMPY = [name for name in DTYPE_NAMES if name != "bfloat16"]
ARRAYS = hnp.arrays(st.sampled_from(NUMPY), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))


def parts_of(arrays: list[np.ndarray]) -> list[Part]:
    return [Part(array.dtype.name, array.shape) for array in arrays]


@given(st.lists(ARRAYS, max_size=4))
def test_join_split_round_trip(arrays: list[np.ndarray]) -> None:
    buffer = join(arrays)
    again = split(buffer, parts_of(arrays))
    assert buffer.size == sum(array.nbytes for array in arrays) == sum(part.nbytes for part in parts_of(arrays))
    assert parts_of(again) == parts_of(arrays)
    assert [each.tobytes() for each in again] == [each.tobytes() for each in arrays]


@given(st.lists(ARRAYS, max_size=3), st.binary(max_size=40))
def test_split_refuses_another_length(arrays: list[np.ndarray], data: bytes) -> None:
    parts = parts_of([np.zeros_like(array) for array in arrays if array.dtype != np.bool_])
    buffer = np.frombuffer(data, np.uint8)
    if buffer.size == sum(part.nbytes for part in parts):
        assert len(split(buffer, parts)) == len(parts)
    else:
        with pytest.raises(RemoteProtocolError, match="expected"):
            split(buffer, parts)


def test_join_is_row_major_and_little_endian() -> None:
    matrix = np.arange(6, dtype=">u2").reshape(2, 3)
    assert join([matrix.T]).tolist() == [0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0]
    assert join([matrix, matrix]).size == 24


def test_split_returns_views_of_the_buffer() -> None:
    buffer = join([np.zeros(3, np.uint8), np.ones(2, np.float32)])
    assert all(np.shares_memory(part, buffer) for part in split(buffer, [Part("uint8", (3,)), Part("float32", (2,))]))


def test_split_refuses_a_size_beyond_memory() -> None:
    with pytest.raises(RemoteProtocolError, match="3 bytes, expected 8796093022208"):
        split(np.zeros(3, np.uint8), [Part("float64", (2**20, 2**20))])


def test_split_refuses_an_invalid_bool() -> None:
    with pytest.raises(RemoteProtocolError, match="neither 0 nor 1"):
        split(np.array([0, 2], np.uint8), [Part("bool", (2,))])


def test_join_and_split_refuse_unsupported_types() -> None:
    with pytest.raises(LocalProtocolError, match="object"):
        join([np.array([None])])
    with pytest.raises(LocalProtocolError, match="'string'"):
        split(np.zeros(3, np.uint8), [Part("string", (3,))])


MASKS = hnp.arrays(np.bool_, st.integers(0, 40))


@given(MASKS)
def test_mask_takes_one_bit_per_row(mask: np.ndarray) -> None:
    packed = pack(mask)
    assert packed.size == -(-mask.size // 8)
    np.testing.assert_array_equal(unpack(packed, "bool", mask.shape), mask)


@given(MASKS, st.integers(0, 5), st.sampled_from(["float32", "float16", "int32"]))
def test_scatter_rows_restores_selected_rows_and_zeros(mask: np.ndarray, columns: int, dtype: str) -> None:
    matrix = np.arange(1, mask.size * columns + 1).reshape(mask.size, columns).astype(dtype)
    sent = select_rows(matrix, mask)
    assert sent.shape == (mask.sum(), columns)
    again = scatter_rows(sent, mask)
    assert again.dtype == matrix.dtype
    np.testing.assert_array_equal(again, np.where(mask[:, None], matrix, np.zeros_like(matrix)))


def test_full_mask_copies_nothing() -> None:
    matrix, mask = np.ones((3, 2)), np.ones(3, np.bool_)
    assert select_rows(matrix, mask) is matrix and scatter_rows(matrix, mask) is matrix


@pytest.mark.parametrize("sent", [np.zeros((1, 2)), np.zeros((3, 2)), np.zeros(())], ids=["fewer", "more", "none"])
def test_scatter_rows_refuses_a_wrong_number_of_rows(sent: np.ndarray) -> None:
    with pytest.raises(RemoteProtocolError, match="with a mask that marks 2"):
        scatter_rows(sent, np.array([True, True, False]))


def test_mask_of_wrong_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="expected 2"):
        unpack(np.zeros(1, np.uint8), "bool", (9,))


INTEGERS = TYPES[1:]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)


def is_identical(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def again(array: np.ndarray) -> np.ndarray:
    return unpack(pack(array), array.dtype.name, array.shape)


@st.composite
def narrow_integers(draw: st.DrawFn) -> np.ndarray:
    """Integers of some type within a few bits of each other, and of any number."""
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    info = np.iinfo(dtype)
    width = draw(st.integers(0, 8 * dtype.itemsize))
    least = draw(st.integers(info.min, info.max - min((1 << width) - 1, info.max - info.min)))
    count = draw(st.integers(0, 200))
    values = draw(st.randoms(use_true_random=False))
    return np.array([least + values.randrange(1 << width) for _ in range(count)], dtype)


@given(hnp.arrays(st.sampled_from(TYPES), SHAPES))
def test_pack_unpack_is_bit_exact(array: np.ndarray) -> None:
    assert is_identical(again(array), array)


@given(narrow_integers())
def test_packed_size_follows_the_range_of_values(array: np.ndarray) -> None:
    packed = pack(array)
    span = int(array.max()) - int(array.min()) if array.size else 0
    assert packed.size == 1 + array.itemsize + -(-array.size * span.bit_length() // 8)
    assert is_identical(unpack(packed, array.dtype.name, array.shape), array)


def test_pack_accepts_views_and_big_endian_arrays() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    assert unpack(pack(array.T[::-1]), "int32", (4, 3)).tolist() == array.T[::-1].tolist()


@given(st.sampled_from(TYPES), st.lists(st.integers(0, 9), max_size=3), st.binary(max_size=60))
def test_unpack_gives_the_expected_shape_or_refuses(dtype: str, dims: list[int], data: bytes) -> None:
    try:
        array = unpack(np.frombuffer(data, np.uint8), dtype, tuple(dims))
    except RemoteProtocolError:
        return
    assert (array.dtype.name, array.shape) == (dtype, tuple(dims))


@given(narrow_integers(), st.data())
def test_unpack_of_changed_bytes_differs_or_is_refused(array: np.ndarray, data: st.DataObject) -> None:
    packed = pack(array).copy()
    packed[data.draw(st.integers(0, packed.size - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = unpack(packed, array.dtype.name, array.shape)
    except RemoteProtocolError:
        return
    assert not array.size or not is_identical(other, array)


@pytest.mark.parametrize(
    ("data", "dims", "words"),
    [
        ([], (2,), "0 bytes of packed numbers, expected 2"),
        ([9, 0], (1,), "a packed int8 has 9 bits"),
        ([3, 0, 1, 1], (2,), "4 bytes of packed numbers, expected 3"),
        ([1, 0, 4], (2,), "more bits than there are numbers"),
        ([1, 127, 1], (2,), "out of the range of int8"),
    ],
    ids=["nothing", "too wide", "too long", "bits of nobody", "beyond the type"],
)
def test_unpack_error_states_the_problem(data: list[int], dims: tuple[int, ...], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        unpack(np.array(data, np.uint8), "int8", dims)


@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_unpack_allocates_nothing_for_a_wrong_length(dtype: str) -> None:
    packed = pack(np.array([0, 1], dtype))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="expected"):
            unpack(packed, dtype, (2**30, 2**10))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_unpack_memory_is_bounded_by_its_result() -> None:
    array = np.random.default_rng(0).integers(0, 100, 10**6).astype(np.int8)
    packed = pack(array)
    tracemalloc.start()
    try:
        unpack(packed, "int8", array.shape)
        assert tracemalloc.get_traced_memory()[1] < 5 * array.nbytes
    finally:
        tracemalloc.stop()


def test_pack_refuses_floats() -> None:
    with pytest.raises(LocalProtocolError, match="float32 cannot be packed"):
        pack(np.zeros(3, np.float32))
    with pytest.raises(LocalProtocolError, match="float32 cannot be packed"):
        unpack(np.zeros(3, np.uint8), "float32", (3,))


# -------------------- Zstandard behind a probe: when it is tried, round trips, and refusal of other bytes
zstandard = pytest.importorskip("zstandard")
NOISE = np.random.default_rng(0).integers(0, 256, 4 * SAMPLE_BYTES).astype(np.uint8)
ZEROS = np.zeros(4 * SAMPLE_BYTES, np.uint8)


@given(data=st.binary(max_size=300), times=st.integers(1, 20))
def test_zstd_round_trip_is_smaller(data: bytes, times: int) -> None:
    whole = np.frombuffer(data * times, np.uint8)
    small = compress_zstd(whole)
    if small is not None:
        assert small.size <= 0.97 * whole.size
        np.testing.assert_array_equal(decompress_zstd(small, whole.size), whole)


ZEROS_IN_NOISE = np.random.default_rng(0).integers(0, 256, 65 * SAMPLE_BYTES).astype(np.uint8)
ZEROS_IN_NOISE[32 * SAMPLE_BYTES : 33 * SAMPLE_BYTES] = 0


@pytest.mark.parametrize(
    ("data", "compressed_sizes", "smaller"),
    [
        (NOISE, [SAMPLE_BYTES], False),
        (ZEROS, [SAMPLE_BYTES, ZEROS.size], True),
        (ZEROS_IN_NOISE, [SAMPLE_BYTES, ZEROS_IN_NOISE.size], False),
        (ZEROS[:0], [0], False),
        (ZEROS[:1], [1], False),
        (NOISE[:100], [100], False),
    ],
    ids=["noise", "zeros", "zeros among noise", "nothing", "a byte", "little noise"],
)
def test_zstd_tries_a_middle_sample_first(
    data: np.ndarray, compressed_sizes: list[int], smaller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, compressor = [], zstandard.ZstdCompressor(level=1)

    class CountingCompressor:
        def compress(self, part: memoryview) -> bytes:
            sizes.append(len(part))
            return compressor.compress(part)

    monkeypatch.setattr(zstandard, "ZstdCompressor", lambda level: CountingCompressor())
    assert (compress_zstd(data) is not None) is smaller
    assert sizes == compressed_sizes


@given(data=st.binary(max_size=60), size=st.integers(0, 200))
def test_zstd_decompresses_to_the_size_or_refuses(data: bytes, size: int) -> None:
    try:
        assert decompress_zstd(np.frombuffer(data, np.uint8), size).size == size
    except RemoteProtocolError:
        return


@given(place=st.integers(0, 10_000), change=st.integers(1, 255), cut=st.integers(0, 40))
def test_zstd_changed_or_truncated_bytes_keep_the_size_or_are_refused(place: int, change: int, cut: int) -> None:
    whole = np.resize(NOISE[:50], 5_000)
    small = compress_zstd(whole)
    assert small is not None
    bad = small.copy()
    bad[place % bad.size] ^= change
    for data in (bad, small[: small.size - 1 - cut % small.size]):
        try:
            assert decompress_zstd(data, whole.size).size == whole.size
        except RemoteProtocolError:
            continue


SMALL = zstandard.ZstdCompressor(level=1).compress(ZEROS.data)


@pytest.mark.parametrize(
    ("data", "size"),
    [*((SMALL, size) for size in (0, ZEROS.size - 1, ZEROS.size + 1, 1 << 50)),
     (SMALL + b"x", ZEROS.size), (SMALL + SMALL, ZEROS.size)],
)  # fmt: skip
def test_zstd_refuses_another_size_and_trailing_bytes(data: bytes, size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="compressed bytes that do not decompress to"):
        decompress_zstd(np.frombuffer(data, np.uint8), size)


def test_zstd_frame_with_larger_size_is_not_decompressed() -> None:
    small = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    assert len(small) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="do not decompress to 100 bytes"):
            decompress_zstd(np.frombuffer(small, np.uint8), 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_missing_zstandard_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"whale-nebula\[zstd\]"):
        compress_zstd(ZEROS)
