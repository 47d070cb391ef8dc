"""The papers' SVD(ratio): its rank, and factors as good as an SVD's, whatever the matrix."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.codec.low_rank import factor, rank_of, restore

SIDES = st.integers(1, 24)


def through(x: np.ndarray, k: int) -> np.ndarray:
    return restore(*factor(tf.constant(x), k)).numpy()


def with_spectrum(m: int, n: int, values: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((m, min(m, n))))[0]
    right = np.linalg.qr(rng.standard_normal((n, min(m, n))))[0]
    return ((left * values) @ right.T).astype(np.float32)


def times_optimal(x: np.ndarray, k: int) -> float:
    """The error at rank k as a multiple of the smallest there is, which `tf.linalg.svd` says."""
    smallest = np.linalg.norm(tf.linalg.svd(tf.constant(x, tf.float64), compute_uv=False).numpy()[k:])
    return float(np.linalg.norm(through(x, k).astype(np.float64) - x) / smallest)


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.001, 1.0))
def test_the_rank_is_the_largest_whose_numbers_fit(m: int, n: int, ratio: float) -> None:
    fits = [k for k in range(1, min(m, n) + 1) if k * (m + n + 1) / (m * n) <= ratio]
    assert rank_of(m, n, ratio) == max(fits, default=0)


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(0.001, 1.0))
def test_factors_are_always_fewer_numbers_than_the_matrix(m: int, n: int, ratio: float) -> None:
    k = rank_of(m, n, ratio)
    assert k * (m + n) < m * n
    assert k < min(m, n) or k == 0


def test_the_ranks_of_the_papers_table() -> None:
    """Their printed ratios for a batch of 8192 rows: half of what SVD(ratio) leaves, by FP16."""
    for ratio, printed in ((0.9, 0.45), (0.6, 0.30), (0.5, 0.25), (0.4, 0.20), (0.3, 0.15)):
        share = rank_of(8192, 768, ratio) * (8192 + 768 + 1) / (8192 * 768) / 2
        assert share == pytest.approx(printed, abs=0.001)
    assert 307 * (512 + 512) > 512 * 512  # a share of the singular values would grow
    assert rank_of(512, 512, 0.6) * (512 + 512) < 0.6 * 512 * 512


@pytest.mark.parametrize("shape", [(200, 64), (64, 200), (96, 96)])
@pytest.mark.parametrize(
    "spectrum",
    [
        pytest.param(lambda i: np.ones(len(i)) + i / 100, id="flat"),
        pytest.param(lambda i: np.where(i < 3, 1e3, 1.0), id="outliers"),
        pytest.param(lambda i: 1 / (1.0 + i) ** 2, id="quadratic"),
        pytest.param(lambda i: np.exp(-0.2 * i), id="exponential"),
        pytest.param(lambda i: np.where(i < 8, 1.0, 1e-5), id="a cliff"),
        pytest.param(lambda i: 1e25 * np.exp(-0.05 * i), id="squares overflow"),
        pytest.param(lambda i: 1e-30 * np.exp(-0.05 * i), id="squares vanish"),
    ],
)
def test_the_error_is_within_one_percent_of_the_smallest(shape: tuple[int, int], spectrum) -> None:  # type: ignore[no-untyped-def]
    x = with_spectrum(*shape, spectrum(np.arange(min(shape))))
    for k in (1, 8, 24):
        assert times_optimal(x, k) <= 1.01


@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, st.integers(0, 2**32 - 1), st.sampled_from([1e-20, 1.0, 1e15]))
def test_random_matrices_of_all_shapes(m: int, n: int, seed: int, scale: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((m, n)) * scale).astype(np.float32)
    k = min(m, n) // 2
    left, right = factor(tf.constant(x), k)
    assert (left.shape, right.shape, left.dtype, right.dtype) == ((m, k), (n, k), tf.float32, tf.float32)
    short = left if m < n else right
    np.testing.assert_allclose(tf.matmul(short, short, transpose_a=True), np.eye(k), atol=1e-5)
    if k:
        assert times_optimal(x, k) <= 1.01


@given(SIDES, SIDES, st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_a_matrix_of_low_rank_comes_back(m: int, n: int, rank: int) -> None:
    rank = min(m, n, rank)
    rng = np.random.default_rng(m * n)
    x = (rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))).astype(np.float32)
    assert np.linalg.norm(through(x, rank) - x) <= 1e-5 * np.linalg.norm(x)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (8, 4), (4, 8)])
def test_rank_zero_and_empty_matrices(shape: tuple[int, int]) -> None:
    left, right = factor(tf.ones(shape), 0)
    assert (left.shape, right.shape) == ((shape[0], 0), (shape[1], 0))
    assert restore(left, right).numpy().tolist() == np.zeros(shape).tolist()


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_zeros_stay_zeros(shape: tuple[int, int]) -> None:
    assert not through(np.zeros(shape, np.float32), 2).any()


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_out_so(shape: tuple[int, int], value: float) -> None:
    x = np.ones(shape, np.float32)
    x[2, 3] = value
    assert not np.isfinite(through(x, 2)[2, 3])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_element_types_are_kept(dtype: tf.DType) -> None:
    x = tf.cast(with_spectrum(50, 20, np.exp(-0.5 * np.arange(20))), dtype)
    left, right = factor(x, 8)
    back = restore(left, right)
    assert {left.dtype, right.dtype, back.dtype} == {dtype}
    error = tf.norm(tf.cast(back - x, tf.float64)) / tf.norm(tf.cast(x, tf.float64))
    assert float(error) < {tf.float16: 0.02, tf.bfloat16: 0.03, tf.float64: 0.02}[dtype]
