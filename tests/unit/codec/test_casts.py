"""Two bytes a number: what is clamped, what stays non-finite, and what rounding by chance gives on average."""

import ml_dtypes
import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec.blocks import count_overflows, restore, to_bf16, to_fp16

SINGLES = hnp.arrays("float32", hnp.array_shapes(max_dims=3, min_side=0, max_side=9), elements=st.floats(width=32))
DOUBLES = hnp.arrays("float64", st.integers(0, 9), elements=st.floats())
KEY = tf.constant([5, 6], tf.uint32)
INFINITE = np.array([np.inf, -np.inf, np.nan], "float32")


@given(SINGLES)
@settings(max_examples=60)
def test_fp16_is_the_nearest_and_clamps_only_what_is_finite(x: np.ndarray) -> None:
    expected = np.where(np.isfinite(x), np.clip(x, -65504, 65504), x).astype("float16")
    np.testing.assert_array_equal(to_fp16(tf.constant(x)).numpy(), expected)


@given(SINGLES)
@settings(max_examples=60)
def test_bf16_is_the_nearest(x: np.ndarray) -> None:
    normal = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)  # TensorFlow may flush denormals, and may not
    with np.errstate(over="ignore"):
        expected = normal.astype(ml_dtypes.bfloat16)
    got = to_bf16(tf.constant(normal)).numpy()
    np.testing.assert_array_equal(got.astype("float32"), expected.astype("float32"))


def test_clamped_counts_what_would_be_infinite() -> None:
    x = tf.constant([65519.0, 65520.0, -1e30, np.inf, np.nan, 0.0])
    assert int(count_overflows(x)) == 2
    assert int(count_overflows(tf.zeros([0, 4]))) == 0


def test_what_is_infinite_stays_so() -> None:
    for cast in (to_fp16, to_bf16, lambda x: to_bf16(x, KEY)):
        np.testing.assert_array_equal(cast(tf.constant(INFINITE)).numpy().astype("float32"), INFINITE)


@given(SINGLES)
@settings(max_examples=40)
def test_bf16_by_chance_is_one_of_the_two_nearest(x: np.ndarray) -> None:
    got = to_bf16(tf.constant(x), KEY).numpy().astype("float32")
    finite = np.isfinite(x)
    down = (x.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    up = (np.minimum(down.view("uint32") + np.uint32(0x10000), x.view("uint32") | np.uint32(0x7F7F0000))).view(
        "float32"
    )
    assert (np.isfinite(got) == finite).all()
    assert ((got == down) | (np.abs(got) > np.abs(x)) & (np.abs(got) <= np.abs(up)))[finite].all()


def test_bf16_by_chance_is_right_on_average_and_the_same_for_a_key() -> None:
    value, step = 1 + 0.3 * 2**-7, 2.0**-7
    x = tf.fill([100_000], np.float32(value))
    got = to_bf16(x, KEY).numpy().astype("float64")
    assert abs(got.mean() - value) < 5 * step / 2 / np.sqrt(x.shape[0])
    assert (to_bf16(x, KEY).numpy().astype("float64") == got).all()
    assert (to_bf16(x, KEY + 1).numpy().astype("float64") != got).any()


def test_a_largest_float16_survives_bf16() -> None:
    x = tf.constant([65504.0, -65504.0, np.inf], tf.float16)
    assert restore(to_bf16(x), "float16").numpy().tolist() == [65504.0, -65504.0, np.inf]
    assert restore(to_fp16(x), "float64").numpy().tolist() == [65504.0, -65504.0, np.inf]
