"""So many bits a number: to the byte, with the error that they buy, and none of what is not finite spread."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.codec import Axes, Coded, parse
from whale_nebula.codec.entropy_coding import dequantise, quantise
from whale_nebula.codec.sizes import fitting
from whale_nebula.errors import OptionError, RemoteProtocolError

KEY = tf.constant([1, 2], tf.uint32)


def normal(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims).astype("float32")


def crossed(codec: Coded, x: np.ndarray, key: object = None) -> np.ndarray:
    """What the other side has; the bytes are those that were foretold."""
    parts = codec.encode(tf.constant(x), key)
    due = codec.parts(x.shape, "float32")
    assert [(part.dtype.name, part.shape) for part in parts] == [tuple(part) for part in due]
    return codec.decode(parts, x.shape, "float32").numpy()


def off(x: np.ndarray, again: np.ndarray) -> float:
    return float(np.linalg.norm(again - x) / np.linalg.norm(x))


@pytest.mark.parametrize(("bits", "error"), [(1.0, 0.66), (1.5, 0.48), (2.0, 0.33), (3.0, 0.165), (6.0, 0.0225)])
@pytest.mark.parametrize("rows", [200, 4000])
def test_a_bit_more_halves_the_error(bits: float, error: float, rows: int) -> None:
    x = normal(rows, 128)
    assert 0.85 * error < off(x, crossed(Coded(bits), x)) < error


def test_each_row_loses_the_same_share() -> None:
    x = normal(300, 128) * np.geomspace(1e-6, 1e3, 300, dtype="float32")[:, None]
    again = crossed(Coded(2.5), x)
    shares = np.linalg.norm(again - x, axis=1) / np.linalg.norm(x, axis=1)
    assert shares.max() < 1.6 * shares.min()


@pytest.mark.parametrize("bits", [1.0, 2.3])
def test_of_a_gradient_its_own_share_is_whole(bits: float) -> None:
    x = normal(300, 128) * np.exp(normal(300, 1))
    again = crossed(Coded(bits), x, KEY)
    assert float((again * x).sum() / (x * x).sum()) == pytest.approx(1.0, rel=1e-3)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from([0.0, 1e-42, 1e-30, 1e-8, 1.0, 1e30, 3e38]),
    st.sampled_from([0.3, 2.0, 6.0]), st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_sizes_and_magnitudes_cross(dims: list[int], scale: float, bits: float, back: bool) -> None:
    x = np.clip(normal(*dims), -1, 1) * np.float32(scale)
    again = crossed(Coded(bits), x, KEY if back else None)
    assert again.shape == x.shape and np.isfinite(again).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_becomes_nan_and_spoils_no_other(bad: float) -> None:
    x = normal(40, 64)
    x[3, 5] = bad
    again = crossed(Coded(3.0), x)
    assert np.isnan(again[3]).all() and np.isfinite(np.delete(again, 3, axis=0)).all()
    assert off(np.delete(x, 3, axis=0), np.delete(again, 3, axis=0)) < 0.25


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_held_within_their_range(dtype: str) -> None:
    x = tf.cast(tf.fill([64, 64], tf.as_dtype(dtype).max), dtype)
    again = Coded(2.0).decode(Coded(2.0).encode(x), (64, 64), dtype)
    assert again.dtype == tf.as_dtype(dtype) and bool(tf.reduce_all(tf.math.is_finite(tf.cast(again, tf.float32))))


def test_bytes_that_mean_nothing_are_refused() -> None:
    good = quantise(normal(20, 32), 400, whole=False)
    for place, value in ((3, 0xFF), (7, 0xFF), (len(good) - 1, 1), (9, good[9] ^ 0xFF)):
        bad = good.copy()
        bad[place] = value
        with pytest.raises(RemoteProtocolError):
            dequantise(bad, 20, 32)


@pytest.mark.parametrize("bits", [0, -1, 6.5, True, "2"])
def test_bits_that_cannot_be(bits: object) -> None:
    with pytest.raises(OptionError, match="above 0 and at most 6"):
        Coded(bits)  # type: ignore[arg-type]


def test_small_tensors_cross_as_they_are() -> None:
    assert fitting(parse("coded(2)"), "float32", (4, 8)) is None
    assert fitting(Axes() >> Coded(2), "float32", (8, 256)) == Coded(2)
    assert fitting(Axes() >> Coded(2), "float32", (128, 256)) == Axes() >> Coded(2)
    assert fitting(Axes(), "float32", (128, 256)) is None


@pytest.mark.parametrize("bits", [2.0, 3.0, 6.0])
@pytest.mark.parametrize("kept", [1, 5])
def test_rows_of_few_numbers_are_not_cut_off(bits: float, kept: int) -> None:
    x, draw = np.zeros((16, 16384), "float32"), np.random.default_rng(0)
    for row in x:
        row[draw.choice(16384, kept, replace=False)] = draw.normal(size=kept)
    assert off(x, crossed(Coded(bits), x)) < 0.01


def test_what_a_float64_holds_and_a_float32_does_not_is_as_large_as_can_be() -> None:
    x = np.array([[1e300] * 64, [np.inf] * 64, [1.0] * 64] * 20)
    again = Coded(3.0).decode(Coded(3.0).encode(tf.constant(x)), x.shape, "float64").numpy()
    assert (again[0] > 1e38).all() and np.isnan(again[1]).all() and np.isfinite(again[2]).all()


@pytest.mark.parametrize("cut", range(12))
def test_bytes_that_are_cut_off_are_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError):
        dequantise(quantise(normal(4, 16), 60, whole=True)[:cut], 4, 16)
