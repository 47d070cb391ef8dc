"""Entropy coding: exact bytes and expected errors at a number of bits a number; whole numbers by frequency."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec import Axes, Coded, entropy_coding, parse
from whale_nebula.codec.entropy_coding import dequantise, quantise
from whale_nebula.codec.sizes import choose_codec
from whale_nebula.errors import OptionError, RemoteProtocolError

KEY = tf.constant([1, 2], tf.uint32)


def normal(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims).astype("float32")


def round_trip(codec: Coded, x: np.ndarray, key: object = None) -> np.ndarray:
    """What the other side has; the bytes are those that were foretold."""
    parts = codec.encode(tf.constant(x), key)
    due = codec.parts(x.shape, "float32")
    assert [(part.dtype.name, part.shape) for part in parts] == [tuple(part) for part in due]
    return codec.decode(parts, x.shape, "float32").numpy()


def relative_error(x: np.ndarray, again: np.ndarray) -> float:
    return float(np.linalg.norm(again - x) / np.linalg.norm(x))


@pytest.mark.parametrize(("bits", "error"), [(1.0, 0.66), (1.5, 0.48), (2.0, 0.33), (3.0, 0.165), (6.0, 0.0225)])
@pytest.mark.parametrize("rows", [200, 4000])
def test_coded_error_halves_with_each_bit(bits: float, error: float, rows: int) -> None:
    x = normal(rows, 128)
    assert 0.85 * error < relative_error(x, round_trip(Coded(bits), x)) < error


def test_coded_relative_error_is_equal_in_all_rows() -> None:
    x = normal(300, 128) * np.geomspace(1e-6, 1e3, 300, dtype="float32")[:, None]
    again = round_trip(Coded(2.5), x)
    shares = np.linalg.norm(again - x, axis=1) / np.linalg.norm(x, axis=1)
    assert shares.max() < 1.6 * shares.min()


@pytest.mark.parametrize("bits", [1.0, 2.3])
def test_coded_gradient_projection_is_unbiased(bits: float) -> None:
    x = normal(300, 128) * np.exp(normal(300, 1))
    again = round_trip(Coded(bits), x, KEY)
    assert float((again * x).sum() / (x * x).sum()) == pytest.approx(1.0, rel=1e-3)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from([0.0, 1e-42, 1e-30, 1e-8, 1.0, 1e30, 3e38]),
    st.sampled_from([0.3, 2.0, 6.0]), st.booleans(),
)  # fmt: skip
def test_coded_accepts_any_sizes_and_magnitudes(dims: list[int], scale: float, bits: float, back: bool) -> None:
    x = np.clip(normal(*dims), -1, 1) * np.float32(scale)
    again = round_trip(Coded(bits), x, KEY if back else None)
    assert again.shape == x.shape and np.isfinite(again).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_coded_nonfinite_row_becomes_nan_alone(bad: float) -> None:
    x = normal(40, 64)
    x[3, 5] = bad
    again = round_trip(Coded(3.0), x)
    assert np.isnan(again[3]).all() and np.isfinite(np.delete(again, 3, axis=0)).all()
    assert relative_error(np.delete(x, 3, axis=0), np.delete(again, 3, axis=0)) < 0.25


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_coded_narrow_types_stay_finite(dtype: str) -> None:
    x = tf.cast(tf.fill([64, 64], tf.as_dtype(dtype).max), dtype)
    again = Coded(2.0).decode(Coded(2.0).encode(x), (64, 64), dtype)
    assert again.dtype == tf.as_dtype(dtype) and bool(tf.reduce_all(tf.math.is_finite(tf.cast(again, tf.float32))))


def test_coded_invalid_bytes_are_refused() -> None:
    good = quantise(normal(20, 32), 400, unbiased=False)
    for place, value, words in (
        (3, 0xFF, "an invalid header"),  # a negative scale
        (7, 0xFF, "an invalid header"),  # more scales than there are bytes
        (len(good) - 1, 1, "followed by extra bytes"),
        (9, good[9] ^ 0xFF, "decompress"),
    ):
        bad = good.copy()
        bad[place] = value
        with pytest.raises(RemoteProtocolError, match=words):
            dequantise(bad, 20, 32)


@pytest.mark.parametrize("bits", [0, -1, 6.5, True, "2"])
def test_coded_invalid_bits_are_refused(bits: object) -> None:
    with pytest.raises(OptionError, match="above 0 and at most 6"):
        Coded(bits)  # type: ignore[arg-type]


def test_small_tensors_use_no_axes_and_no_coding() -> None:
    assert choose_codec(parse("coded(2)"), "float32", (4, 8)) is None
    assert choose_codec(Axes() >> Coded(2), "float32", (8, 256)) == Coded(2)
    assert choose_codec(Axes() >> Coded(2), "float32", (128, 256)) == Axes() >> Coded(2)
    assert choose_codec(Axes(), "float32", (128, 256)) is None


@pytest.mark.parametrize("bits", [2.0, 3.0, 6.0])
@pytest.mark.parametrize("kept", [1, 5])
def test_coded_sparse_rows_keep_their_numbers(bits: float, kept: int) -> None:
    x, draw = np.zeros((16, 16384), "float32"), np.random.default_rng(0)
    for row in x:
        row[draw.choice(16384, kept, replace=False)] = draw.normal(size=kept)
    assert relative_error(x, round_trip(Coded(bits), x)) < 0.01


def test_coded_float64_beyond_float32_saturates() -> None:
    x = np.array([[1e300] * 64, [np.inf] * 64, [1.0] * 64] * 20)
    again = Coded(3.0).decode(Coded(3.0).encode(tf.constant(x)), x.shape, "float64").numpy()
    assert (again[0] > 1e38).all() and np.isnan(again[1]).all() and np.isfinite(again[2]).all()


@pytest.mark.parametrize("cut", range(12))
def test_coded_truncated_bytes_are_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError):
        dequantise(quantise(normal(4, 16), 60, unbiased=True)[:cut], 4, 16)


MAGNITUDES = st.sampled_from([0, 1, 3, 7, 127, 128, 32767])


@given(st.data(), MAGNITUDES)
def test_pack_unpack_round_trip(data: st.DataObject, most: int) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=70))
    numbers = data.draw(hnp.arrays("int16", shape, elements=st.integers(-most, most)))
    packed = entropy_coding.pack(numbers)
    again, used = entropy_coding.unpack(np.append(packed, np.uint8(7)), *shape)
    np.testing.assert_array_equal(again, numbers)
    assert used == packed.size


@pytest.mark.parametrize(
    ("deviation", "more"), [(0.15, 0.05), (0.25, 0.12), (0.4, 0.1), (1.0, 0.07), (3.0, 0.05), (20.0, 0.05)]
)
def test_packed_size_is_near_the_entropy(deviation: float, more: float) -> None:
    numbers = np.rint(np.random.default_rng(0).normal(size=(4000, 64)) * deviation).astype(np.int16)
    shares = np.unique(numbers, return_counts=True)[1] / numbers.size
    entropy = -(shares * np.log2(shares)).sum()
    assert entropy < 8 * entropy_coding.pack(numbers).size / numbers.size < entropy + more


def test_column_groups_have_separate_frequencies() -> None:
    drawn = np.random.default_rng(0).normal(size=(4000, 64))
    sizes = np.geomspace(8, 1 / 8, 64)
    apart, mixed = (np.rint(drawn * each).astype(np.int16) for each in (sizes, sizes.reshape(8, 8).T.reshape(-1)))
    assert entropy_coding.pack(apart).size < 0.85 * entropy_coding.pack(mixed).size


def test_unpack_refuses_invalid_data() -> None:
    good = entropy_coding.pack(np.eye(16, dtype=np.int16))
    for bad, words in (
        (good[:-1], "invalid header"),  # the last group ends early
        (good[:3], "truncated before their last group"),
        (np.concatenate([good[:2], np.array([255, 255, 255, 255], np.uint8), good[6:]]), "invalid header"),
        (with_byte(good, 0, 3), "invalid header"),  # symbols of three numbers
        (with_byte(good, 1, 127), "invalid header"),  # eight numbers of 255 values in a byte
        (with_byte(good, 6, 0xFF), "cannot be decompressed"),
    ):
        with pytest.raises(RemoteProtocolError, match=words):
            entropy_coding.unpack(bad, 16, 16)


def test_inflate_refuses_data_larger_than_expected() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    made = bomb.compress(bytes(50_000_000)) + bomb.flush()
    with pytest.raises(RemoteProtocolError, match="the expected 9 bytes"):
        entropy_coding.inflate(made, 9)


def test_unpack_refuses_a_symbol_beyond_its_group() -> None:
    body = entropy_coding.deflate(bytes([3] * 8))  # of three values, one number a symbol
    data = np.frombuffer(bytes([1, 1]) + len(body).to_bytes(4, "little") + body, np.uint8)
    with pytest.raises(RemoteProtocolError, match="exceeds its group's"):
        entropy_coding.unpack(data, 1, 8)


def with_byte(data: np.ndarray, place: int, value: int) -> np.ndarray:
    changed = data.copy()
    changed[place] = value
    return changed
