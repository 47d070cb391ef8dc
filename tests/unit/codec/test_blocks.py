"""Integers block by block: against the same arithmetic in numpy, bit for bit, and what must hold of the result."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec import blocks
from whale_nebula.codec.blocks import dequantise, levels, parts, quantise, rounded_up
from whale_nebula.errors import RemoteProtocolError

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


def reference(x: np.ndarray, bits: int, block: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
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


def crossed(x: tf.Tensor, bits: int, block: int, key: tf.Tensor | None = None) -> np.ndarray:
    scales, integers = quantise(x, bits=bits, block=block, key=key)
    back = dequantise(scales, integers, dims=tuple(x.shape), bits=bits, block=block, dtype=x.dtype.name)
    return back.numpy().astype("float64")


def unpaired(integers: np.ndarray, columns: int) -> np.ndarray:
    return np.concatenate([integers & 15, integers >> 4], axis=1)[:, :columns].astype("int8") - 8


def matrix(x: np.ndarray) -> np.ndarray:
    columns = x.shape[-1] if x.ndim else 1
    return x.reshape(-1 if x.size else int(np.prod(x.shape[:-1])), columns)


def limits(x: np.ndarray, bits: int, block: int, dtype: str = "float32") -> np.ndarray:
    """The scale of each number's block."""
    scales, _ = reference(matrix(x.astype("float32")), bits, block, dtype)
    return np.repeat(scales, block, axis=1)[:, : matrix(x).shape[1]].reshape(x.shape).astype("float64")


@pytest.mark.parametrize(("bits", "block"), KINDS)
@given(TENSORS)
@settings(max_examples=40, deadline=None)
def test_bytes_are_those_of_the_definition(bits: int, block: int, x: np.ndarray) -> None:
    scales, integers = quantise(tf.constant(x), bits=bits, block=block)
    got = integers.numpy() if bits == 8 else unpaired(integers.numpy(), matrix(x).shape[1])
    expected = reference(matrix(x), bits, block)
    np.testing.assert_array_equal(scales.numpy().astype("float32"), expected[0])
    np.testing.assert_array_equal(got, expected[1])
    made = [(part.dtype.name, tuple(part.shape)) for part in (scales, integers)]
    assert made == [(part.dtype, part.dims) for part in parts(x.shape, bits, block)]


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "by chance"])
@pytest.mark.parametrize(("bits", "block"), KINDS)
@given(TENSORS)
@settings(max_examples=25, deadline=None)
def test_a_number_comes_back_within_its_scale_and_a_broken_block_as_nan(
    bits: int, block: int, key: tf.Tensor | None, x: np.ndarray
) -> None:
    back, scale = crossed(tf.constant(x), bits, block, key), limits(x, bits, block)
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
def test_every_type_keeps_its_range(bits: int, block: int, dtype: str) -> None:
    top = min(float(tf.as_dtype(dtype).max), float(np.finfo("float32").max))
    rows = [np.full(40, top), np.linspace(-1, 1, 40) * top, np.zeros(40), np.linspace(-3, 3, 40), np.full(40, 1e-40)]
    with np.errstate(under="ignore"), warnings.catch_warnings():
        x = tf.constant(np.stack(rows).astype(tf.as_dtype(dtype).as_numpy_dtype))
    back, raw = crossed(x, bits, block), x.numpy().astype("float64")
    assert np.isfinite(back).all()
    # half a scale; at the top of the range a scale may be 0.8 % too small
    bound = max(0.51 / levels(bits), 0.008)
    assert (np.abs(back - raw).max(axis=1) <= np.abs(raw).max(axis=1) * bound + TINY).all()


def test_a_float64_beyond_float32_is_seen_as_an_overflow() -> None:
    back = crossed(tf.constant([[1e300, 1.0], [1.0, 2.0]], tf.float64), 8, 64)
    assert np.isnan(back[0]).all()
    assert np.isfinite(back[1]).all()


@pytest.mark.parametrize(("bits", "block"), KINDS)
def test_by_chance_each_number_is_right_on_average(bits: int, block: int) -> None:
    values = np.array([1.0, *np.random.default_rng(0).uniform(-1, 1, 29), 0.0, -1.0], "float32")
    rows = 8000
    back = crossed(tf.constant(np.tile(values, (rows, 1))), bits, block, KEY)
    scale = limits(values[None], bits, block)[0]
    assert (np.abs(back.mean(axis=0) - values) <= 5 * scale / 2 / np.sqrt(rows)).all()
    assert (back[:, 30] == 0).all()
    assert (np.abs(back - values) < scale).all()


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "by chance"])
@pytest.mark.parametrize(("bits", "block"), KINDS)
def test_compiled_or_not_the_bytes_are_the_same(
    bits: int, block: int, key: tf.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).standard_normal((1030, 99)).astype("float32")
    x[3, 5], x[7, 0], x[8], x[9], x[10, :50] = np.nan, np.inf, 0, x[9] * 1e-40, 3.4e38
    plain = quantise(tf.constant(x), bits=bits, block=block, key=key)
    monkeypatch.setattr(blocks, "_COMPILED_FROM", 1000)
    compiled = quantise(tf.constant(x), bits=bits, block=block, key=key)
    for one, other in zip(plain, compiled, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


@given(st.integers(1, 10**7))
def test_rows_are_rounded_up_by_an_eighth_at_most(rows: int) -> None:
    assert rows <= rounded_up(rows) <= rows * 9 / 8
    assert rounded_up(rounded_up(rows)) == rounded_up(rows)


@pytest.mark.parametrize(("bits", "block"), KINDS)
def test_parts_of_another_tensor_are_refused(bits: int, block: int) -> None:
    scales, integers = quantise(tf.ones([4, 100]), bits=bits, block=block)
    for wrong in (
        (integers, scales),
        (scales[:3], integers),
        (scales, integers[:, :-1]),
        (tf.cast(scales, "float32"), integers),
    ):
        with pytest.raises(RemoteProtocolError):
            dequantise(*wrong, dims=(4, 100), bits=bits, block=block, dtype="float32")


@given(st.binary(min_size=30, max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_bytes_decode_to_something(data: bytes) -> None:
    scales = np.frombuffer(data[:4], ml_dtypes.bfloat16).reshape(2, 1)
    integers = np.frombuffer(data[4:], "uint8").reshape(2, 13)
    back = dequantise(tf.constant(scales), tf.constant(integers), dims=(2, 26), bits=4, block=32, dtype="float32")
    assert back.shape == (2, 26)
