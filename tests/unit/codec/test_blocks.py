"""Block-wise integers, two bytes a number, and the generator of stochastic rounding on both sides."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec import blocks
from whale_nebula.codec.blocks import (
    count_overflows,
    dequantise,
    levels,
    parts,
    quantise,
    restore,
    round_up_rows,
    to_bf16,
    to_fp16,
    unpack_pairs,
)

KINDS = [(8, 64), (4, 32)]
KEY = tf.constant([11, 12], tf.uint32)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
TINY = 2.0**-100
"""The smallest scale; what is below half of it becomes zero."""
DIMS = st.sampled_from([(1,), (3, 64), (2, 2, 65), (65,), (0, 64), (4, 0), (2, 0, 65), ()])
NUMBERS = st.one_of(
    st.floats(width=32),
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1e30, -1e30, 3.4e38, 1e-40, 1e-45, 1e-36, 65504.0, np.inf, -np.inf, np.nan]).map(
        np.float32
    ),
)
TENSORS = DIMS.flatmap(lambda dims: hnp.arrays("float32", dims, elements=NUMBERS.map(float), fill=st.just(0.5)))


def quantise_reference(x: np.ndarray, bits: int, block: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Scales and unpaired integers of a matrix of float32, one block after the other."""
    rows, columns = x.shape
    most = np.float32(levels(bits))
    largest = min(float(tf.as_dtype(dtype).max), float(np.finfo("float32").max))
    highest = (np.float32(largest / levels(bits)).view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    scales, integers = np.empty((rows, -(-columns // block)), "float32"), np.zeros(x.shape, "int8")
    for row in range(rows):
        for number, start in enumerate(range(0, columns, block)):
            part = x[row, start : start + block]
            if not np.isfinite(part).all():
                scales[row, number] = np.nan
                continue
            exact = np.abs(part).max() * (np.float32(1) / most)
            rounded = ((exact.view("uint32") + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view("float32")
            scale = scales[row, number] = np.clip(rounded, np.float32(TINY), highest)
            integers[row, start : start + block] = np.clip(np.rint(part / scale), -most, most)
    return scales, integers


def round_trip(x: tf.Tensor, bits: int, block: int, key: tf.Tensor | None = None) -> np.ndarray:
    scales, integers = quantise(x, bits=bits, block=block, key=key)
    back = dequantise(scales, integers, dims=tuple(x.shape), bits=bits, block=block, dtype=x.dtype.name)
    return back.numpy().astype("float64")


def unpair_nibbles(integers: np.ndarray, columns: int) -> np.ndarray:
    return np.concatenate([integers & 15, integers >> 4], axis=1)[:, :columns].astype("int8") - 8


def to_matrix(x: np.ndarray) -> np.ndarray:
    columns = x.shape[-1] if x.ndim else 1
    return x.reshape(-1 if x.size else int(np.prod(x.shape[:-1])), columns)


def block_scales(x: np.ndarray, bits: int, block: int, dtype: str = "float32") -> np.ndarray:
    """The scale of each number's block."""
    scales, _ = quantise_reference(to_matrix(x.astype("float32")), bits, block, dtype)
    return np.repeat(scales, block, axis=1)[:, : to_matrix(x).shape[1]].reshape(x.shape).astype("float64")


@pytest.mark.parametrize(("bits", "block"), KINDS)
@given(TENSORS)
@settings(max_examples=20, deadline=None)
def test_quantised_bytes_match_the_definition(bits: int, block: int, x: np.ndarray) -> None:
    scales, integers = quantise(tf.constant(x), bits=bits, block=block)
    got = integers.numpy() if bits == 8 else unpair_nibbles(integers.numpy(), to_matrix(x).shape[1])
    expected = quantise_reference(to_matrix(x), bits, block)
    np.testing.assert_array_equal(scales.numpy().astype("float32"), expected[0])
    np.testing.assert_array_equal(got, expected[1])
    made = [(part.dtype.name, tuple(part.shape)) for part in (scales, integers)]
    assert made == [(part.dtype, part.dims) for part in parts(x.shape, bits, block)]


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "by chance"])
@pytest.mark.parametrize(("bits", "block"), KINDS)
@given(TENSORS)
@settings(max_examples=12, deadline=None)
def test_round_trip_error_is_within_scale_and_nonfinite_block_is_nan(
    bits: int, block: int, key: tf.Tensor | None, x: np.ndarray
) -> None:
    back, scale = round_trip(tf.constant(x), bits, block, key), block_scales(x, bits, block)
    whole = np.isfinite(scale)
    assert back.shape == x.shape
    assert np.isnan(back[~whole]).all()
    assert np.isfinite(back[whole]).all()
    # the largest float32s lie up to 0.8 % beyond the largest multiple
    slack = np.maximum(scale * (0.5 if key is None else 1), 0.008 * np.abs(x))[whole]
    assert (np.abs(back - x)[whole] <= slack).all()
    assert (np.sign(back) * np.sign(x) >= 0)[whole].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "block"), KINDS)
def test_largest_numbers_of_each_type_stay_finite(bits: int, block: int, dtype: str) -> None:
    top = min(float(tf.as_dtype(dtype).max), float(np.finfo("float32").max))
    rows = [np.full(40, top), np.linspace(-1, 1, 40) * top, np.zeros(40), np.linspace(-3, 3, 40), np.full(40, 1e-40)]
    with np.errstate(under="ignore"), warnings.catch_warnings():
        x = tf.constant(np.stack(rows).astype(tf.as_dtype(dtype).as_numpy_dtype))
    back, raw = round_trip(x, bits, block), x.numpy().astype("float64")
    assert np.isfinite(back).all()
    # half a scale; at the top of the range a scale may be 0.8 % too small
    bound = max(0.51 / levels(bits), 0.008)
    assert (np.abs(back - raw).max(axis=1) <= np.abs(raw).max(axis=1) * bound + TINY).all()


def test_float64_beyond_float32_makes_its_block_nan() -> None:
    back = round_trip(tf.constant([[1e300, 1.0], [1.0, 2.0]], tf.float64), 8, 64)
    assert np.isnan(back[0]).all()
    assert np.isfinite(back[1]).all()


@pytest.mark.parametrize(("bits", "block"), KINDS)
def test_stochastic_rounding_is_unbiased(bits: int, block: int) -> None:
    values = np.array([1.0, *np.random.default_rng(0).uniform(-1, 1, 29), 0.0, -1.0], "float32")
    rows = 8000
    back = round_trip(tf.constant(np.tile(values, (rows, 1))), bits, block, KEY)
    scale = block_scales(values[None], bits, block)[0]
    assert (np.abs(back.mean(axis=0) - values) <= 5 * scale / 2 / np.sqrt(rows)).all()
    assert (back[:, 30] == 0).all()
    assert (np.abs(back - values) < scale).all()


@pytest.mark.parametrize(
    ("bits", "block", "key"),
    [
        pytest.param(
            bits, block, key, marks=() if (bits == 8) == (key is None) else pytest.mark.grid, id=f"{bits}-{how}"
        )
        for bits, block in KINDS
        for key, how in ((None, "nearest"), (KEY, "by chance"))
    ],
)
def test_compiled_quantiser_gives_the_same_bytes(
    bits: int, block: int, key: tf.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).standard_normal((1030, 99)).astype("float32")
    x[3, 5], x[7, 0], x[8], x[9], x[10, :50] = np.nan, np.inf, 0, x[9] * 1e-40, 3.4e38
    plain = quantise(tf.constant(x), bits=bits, block=block, key=key)
    monkeypatch.setattr(blocks, "_LEAST_COMPILED_SIZE", 1000)
    compiled = quantise(tf.constant(x), bits=bits, block=block, key=key)
    for one, other in zip(plain, compiled, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


@given(st.integers(1, 10**7))
def test_round_up_rows_adds_at_most_an_eighth(rows: int) -> None:
    assert rows <= round_up_rows(rows) <= rows * 9 / 8
    assert round_up_rows(round_up_rows(rows)) == round_up_rows(rows)


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (2, 7), (1, 1), (0, 4)])
def test_unpack_pairs_agrees_with_dequantise(rows: int, columns: int) -> None:
    scales, pairs = (part.dims for part in parts((rows, columns), 4, 32))
    drawn = np.random.default_rng(0).integers(0, 256, pairs, np.uint8)
    ones = np.ones(scales, "float32")
    again = dequantise(tf.cast(ones, tf.bfloat16), drawn, dims=(rows, columns), bits=4, block=32, dtype="float32")
    np.testing.assert_array_equal(unpack_pairs(drawn, columns), np.asarray(again))


SINGLES = hnp.arrays("float32", hnp.array_shapes(max_dims=3, min_side=0, max_side=9), elements=st.floats(width=32))


@given(SINGLES)
@settings(max_examples=30)
def test_fp16_rounds_to_nearest_and_clamps_only_finite_numbers(x: np.ndarray) -> None:
    expected = np.where(np.isfinite(x), np.clip(x, -65504, 65504), x).astype("float16")
    np.testing.assert_array_equal(to_fp16(tf.constant(x)).numpy(), expected)


@given(SINGLES)
@settings(max_examples=30)
def test_bf16_rounds_to_nearest(x: np.ndarray) -> None:
    normal = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)  # TensorFlow may flush denormals, and may not
    with np.errstate(over="ignore"):
        expected = normal.astype(ml_dtypes.bfloat16)
    got = to_bf16(tf.constant(normal)).numpy()
    np.testing.assert_array_equal(got.astype("float32"), expected.astype("float32"))


def test_count_overflows_counts_finite_numbers_beyond_fp16() -> None:
    x = tf.constant([65519.0, 65520.0, -1e30, np.inf, np.nan, 0.0])
    assert int(count_overflows(x)) == 2
    assert int(count_overflows(tf.zeros([0, 4]))) == 0


@given(SINGLES)
def test_stochastic_bf16_is_a_nearest_neighbour(x: np.ndarray) -> None:
    got = to_bf16(tf.constant(x), KEY).numpy().astype("float32")
    finite = np.isfinite(x)
    down = (x.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    up = (np.minimum(down.view("uint32") + np.uint32(0x10000), x.view("uint32") | np.uint32(0x7F7F0000))).view(
        "float32"
    )
    assert (np.isfinite(got) == finite).all()
    assert ((got == down) | (np.abs(got) > np.abs(x)) & (np.abs(got) <= np.abs(up)))[finite].all()


def test_stochastic_bf16_is_unbiased_and_reproducible_by_key() -> None:
    value, step = 1 + 0.3 * 2**-7, 2.0**-7
    x = tf.fill([100_000], np.float32(value))
    got = to_bf16(x, KEY).numpy().astype("float64")
    assert abs(got.mean() - value) < 5 * step / 2 / np.sqrt(x.shape[0])
    assert (to_bf16(x, KEY).numpy().astype("float64") == got).all()
    assert (to_bf16(x, KEY + 1).numpy().astype("float64") != got).any()


def test_largest_float16_survives_bf16() -> None:
    x = tf.constant([65504.0, -65504.0, np.inf], tf.float16)
    assert restore(to_bf16(x), "float16").numpy().tolist() == [65504.0, -65504.0, np.inf]
    assert restore(to_fp16(x), "float64").numpy().tolist() == [65504.0, -65504.0, np.inf]


COUNT = 1 << 18
PLACES = tf.constant(np.arange(COUNT, dtype="uint32"))
NEIGHBOURS = [(1, 3), (2, 2), (0, 2), (2, 1), (1, 2 + 2**31), (1 + 2**31, 2), (0, 0)]


def make_key(*words: int) -> tf.Tensor:
    return tf.constant(words, tf.uint32)


def draw_numbers(*words: int) -> np.ndarray:
    return blocks.random_uniform(make_key(*words), PLACES).numpy()


def chi_squared_deviation(counts: np.ndarray) -> float:
    """How many standard deviations chi-squared lies from what equal chances give."""
    expected = counts.sum() / counts.size
    chi = ((counts - expected) ** 2 / expected).sum()
    return float((chi - counts.size) / np.sqrt(2 * counts.size))


def test_random_numbers_are_uniform_below_one() -> None:
    numbers = draw_numbers(1, 2)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(chi_squared_deviation(np.bincount((numbers * 1024).astype(int), minlength=1024))) < 5


@pytest.mark.parametrize("distance", [1, 2, 32, 64, 768])
def test_random_numbers_of_distant_places_are_independent(distance: int) -> None:
    numbers = draw_numbers(1, 2)
    together = np.histogram2d(numbers[:-distance], numbers[distance:], 32, [[0, 1], [0, 1]])[0]
    assert abs(chi_squared_deviation(together)) < 5


@pytest.mark.parametrize("words", NEIGHBOURS)
def test_random_numbers_of_neighbouring_keys_are_independent(words: tuple[int, int]) -> None:
    one, other = draw_numbers(1, 2), draw_numbers(*words)
    assert abs(chi_squared_deviation(np.histogram2d(one, other, 32, [[0, 1], [0, 1]])[0])) < 5


def test_many_tensor_widths_cause_no_retracing_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Each width has functions of its own."""
    with caplog.at_level("WARNING", logger="tensorflow"):
        for columns in range(71, 79):
            x = np.ones((2, columns), "float32")
            np.testing.assert_allclose(round_trip(tf.constant(x), 8, 64), x, rtol=0.01)
    assert "retracing" not in caplog.text
