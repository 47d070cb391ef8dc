"""SVD(ratio), and a shared basis: optimal errors, and exact gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.codec.low_rank import (
    compute_gram,
    decay_and_add,
    expand,
    factor,
    initial_basis,
    largest_rank,
    project,
    renew_basis,
    restore,
)

SIDES = st.integers(1, 24)


def factor_and_restore(x: np.ndarray, k: int) -> np.ndarray:
    return restore(*factor(tf.constant(x), k)).numpy()


def matrix_with_spectrum(m: int, n: int, values: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((m, min(m, n))))[0]
    right = np.linalg.qr(rng.standard_normal((n, min(m, n))))[0]
    return ((left * values) @ right.T).astype(np.float32)


def error_over_optimum(x: np.ndarray, k: int) -> float:
    """The error at rank k as a multiple of the smallest there is, which `tf.linalg.svd` says."""
    smallest = np.linalg.norm(tf.linalg.svd(tf.constant(x, tf.float64), compute_uv=False).numpy()[k:])
    return float(np.linalg.norm(factor_and_restore(x, k).astype(np.float64) - x) / smallest)


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.001, 1.0))
def test_largest_rank_is_the_largest_that_fits_the_ratio(m: int, n: int, ratio: float) -> None:
    fits = [k for k in range(1, min(m, n) + 1) if k * (m + n + 1) / (m * n) <= ratio]
    assert largest_rank(m, n, ratio) == max(fits, default=0)


def test_largest_rank_matches_the_paper() -> None:
    """Their printed ratios for a batch of 8192 rows: half of what SVD(ratio) leaves, by FP16."""
    for ratio, printed in ((0.9, 0.45), (0.6, 0.30), (0.5, 0.25), (0.4, 0.20), (0.3, 0.15)):
        share = largest_rank(8192, 768, ratio) * (8192 + 768 + 1) / (8192 * 768) / 2
        assert share == pytest.approx(printed, abs=0.001)
    assert 307 * (512 + 512) > 512 * 512  # a share of the singular values would grow
    assert largest_rank(512, 512, 0.6) * (512 + 512) < 0.6 * 512 * 512


@pytest.mark.parametrize(
    "shape", [(200, 64), *(pytest.param(shape, marks=pytest.mark.grid) for shape in ((64, 200), (96, 96)))]
)
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
def test_factor_error_is_within_one_percent_of_the_optimum(shape: tuple[int, int], spectrum) -> None:  # type: ignore[no-untyped-def]
    x = matrix_with_spectrum(*shape, spectrum(np.arange(min(shape))))
    for k in (1, 8, 24):
        assert error_over_optimum(x, k) <= 1.01


@given(SIDES, SIDES, st.integers(0, 2**32 - 1), st.sampled_from([1e-20, 1.0, 1e15]))
def test_factor_of_random_matrices_is_orthonormal_and_near_optimal(m: int, n: int, seed: int, scale: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((m, n)) * scale).astype(np.float32)
    k = min(m, n) // 2
    left, right = factor(tf.constant(x), k)
    assert (left.shape, right.shape, left.dtype, right.dtype) == ((m, k), (n, k), tf.float32, tf.float32)
    short = left if m < n else right
    np.testing.assert_allclose(tf.matmul(short, short, transpose_a=True), np.eye(k), atol=1e-5)
    if k:
        assert error_over_optimum(x, k) <= 1.01


@given(SIDES, SIDES, st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_factor_restores_a_low_rank_matrix(m: int, n: int, rank: int) -> None:
    rank = min(m, n, rank)
    rng = np.random.default_rng(m * n)
    x = (rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))).astype(np.float32)
    assert np.linalg.norm(factor_and_restore(x, rank) - x) <= 1e-5 * np.linalg.norm(x)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (8, 4), (4, 8)])
def test_factor_of_rank_zero_and_empty_matrices(shape: tuple[int, int]) -> None:
    left, right = factor(tf.ones(shape), 0)
    assert (left.shape, right.shape) == ((shape[0], 0), (shape[1], 0))
    assert restore(left, right).numpy().tolist() == np.zeros(shape).tolist()


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_factor_keeps_nonfinite_numbers(shape: tuple[int, int], value: float) -> None:
    x = np.ones(shape, np.float32)
    x[2, 3] = value
    assert not np.isfinite(factor_and_restore(x, 2)[2, 3])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_factor_keeps_the_element_type(dtype: tf.DType) -> None:
    x = tf.cast(matrix_with_spectrum(50, 20, np.exp(-0.5 * np.arange(20))), dtype)
    left, right = factor(x, 8)
    back = restore(left, right)
    assert {left.dtype, right.dtype, back.dtype} == {dtype}
    error = tf.norm(tf.cast(back - x, tf.float64)) / tf.norm(tf.cast(x, tf.float64))
    assert float(error) < {tf.float16: 0.02, tf.bfloat16: 0.03, tf.float64: 0.02}[dtype]


def rows(m: int, n: int, seed: int = 0, decay: float = 0.2) -> np.ndarray:
    """Rows whose directions matter less and less."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(np.random.default_rng(99).standard_normal((n, n)))[0]
    return ((rng.standard_normal((m, n)) * np.exp(-decay * np.arange(n))) @ turn).astype(np.float32)


def gram_matrix(x: np.ndarray) -> np.ndarray:
    return compute_gram(tf.constant(x)).numpy()


def projection_error(x: np.ndarray, q: np.ndarray) -> float:
    return float(np.linalg.norm(expand(project(tf.constant(x), q), q) - x) / np.linalg.norm(x))


def optimal_error(x: np.ndarray, r: int) -> float:
    return float(np.linalg.norm(np.linalg.svd(x, compute_uv=False)[r:]) / np.linalg.norm(x))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 12), st.integers(1, 16), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_projection_gradient_equals_autodiff(m: int, n: int, r: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = initial_basis(gram_matrix(rows(20, n)), min(r, n))
    x, g = (tf.constant(rng.standard_normal((m, n)), tf.float32) for _ in range(2))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = expand(project(x, q), q)
    ours = expand(project(g, q), q)
    np.testing.assert_allclose(ours, tape.gradient(y, x, g), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_projection_keeps_the_element_type(dtype: tf.DType) -> None:
    q = initial_basis(gram_matrix(rows(30, 8)), 3)
    z = project(tf.cast(rows(4, 8), dtype), q)
    assert (z.dtype, expand(z, q).dtype) == (dtype, dtype)


@pytest.mark.parametrize("m", [200, 20, 3])
def test_initial_basis_is_optimal_for_its_data(m: int) -> None:
    x = rows(m, 40)
    q = initial_basis(gram_matrix(x), 8)
    assert (q.shape, q.dtype) == ((40, 8), np.float16)
    assert projection_error(x, q) <= 1.01 * optimal_error(x, 8) + 1e-3
    np.testing.assert_allclose(q.astype(np.float64).T @ q, np.eye(8), atol=2e-3)


def test_renewed_basis_follows_the_data() -> None:
    x = rows(300, 40, decay=0.3)
    far = initial_basis(gram_matrix(rows(300, 40)[:, ::-1]), 8)
    q = far
    for _ in range(4):
        q = renew_basis(gram_matrix(x), q)
    assert projection_error(x, far) > 2 * optimal_error(x, 8)
    assert projection_error(x, q) <= 1.05 * optimal_error(x, 8) + 1e-3


def test_renewed_basis_keeps_coordinates_stable() -> None:
    """Other rows of the same kind: the spaces nearly agree, so do the coordinates, though eigenvectors turn freely."""
    x = rows(300, 40, decay=0.0)
    x[:, :8] *= 5.0  # eight directions alike: nothing tells one from the other
    y = np.roll(x, 1, axis=1)[:, np.r_[1:9, 0, 9:40]]
    last = initial_basis(gram_matrix(x), 8)
    new = renew_basis(gram_matrix(y), last)
    fresh = initial_basis(gram_matrix(y), 8)
    before = project(tf.constant(x), last)
    assert tf.norm(project(tf.constant(x), new) - before) <= 0.35 * tf.norm(before)
    assert tf.norm(project(tf.constant(x), fresh) - before) > tf.norm(project(tf.constant(x), new) - before)


def test_renewed_basis_keeps_directions_without_energy() -> None:
    x = rows(50, 12)
    x[:, 6:] = 0
    last = np.eye(12, 12, dtype=np.float16)[:, 4:8]
    new = renew_basis(gram_matrix(x), last)
    np.testing.assert_allclose(new.astype(np.float64).T @ new, np.eye(4), atol=2e-3)
    np.testing.assert_allclose(np.abs(new[6:8, 2:]), np.eye(2), atol=1e-3)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_unusable_gram_matrix_keeps_the_basis(value: float) -> None:
    last = initial_basis(gram_matrix(rows(30, 8)), 3)
    empty = np.full((8, 8), value, np.float32)
    assert renew_basis(empty, last) is last
    assert initial_basis(empty, 3).tolist() == np.eye(8, 3).tolist()


def test_renewed_basis_is_independent_of_scale() -> None:
    g = gram_matrix(rows(300, 40))
    last = initial_basis(gram_matrix(rows(300, 40, seed=5)), 8)
    for scale in (2.0**-80, 2.0**80):
        assert renew_basis(g * np.float32(scale), last).tobytes() == renew_basis(g, last).tobytes()


class TestDecayedSum:
    @pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
    def test_nonfinite_new_matrix_is_omitted(self, value: float) -> None:
        g = tf.eye(2) * 2e38
        new = compute_gram(tf.constant([[1.0, 0.0], [0.0, value]]))
        assert decay_and_add(g, new).numpy().tolist() == g.numpy().tolist()

    def test_nonfinite_sum_is_reset(self) -> None:
        assert decay_and_add(tf.constant([[np.nan]]), tf.constant([[4.0]])).numpy().tolist() == [[0.0]]
        assert decay_and_add(tf.zeros([1, 1]), tf.constant([[4.0]])).numpy().tolist() == [[4.0]]

    def test_gram_of_no_rows_is_zero(self) -> None:
        assert not compute_gram(tf.zeros([0, 3])).numpy().any()
        assert not compute_gram(tf.zeros([0, 3]), rows=4).numpy().any()

    def test_rows_are_sampled_evenly(self) -> None:
        x = tf.one_hot([0, 1, 2, 3, 0, 1, 2, 3], 4)
        assert compute_gram(x, rows=4).numpy().tolist() == np.diag([2.0, 0.0, 2.0, 0.0]).tolist()
        assert compute_gram(x, rows=100).numpy().tolist() == (2 * np.eye(4)).tolist()
