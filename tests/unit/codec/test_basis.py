"""A basis that both sides hold: an exact gradient, directions that follow the data, coordinates that do not jump."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.codec.low_rank import expand, first, gram_of, project, renew_basis, running


def rows(m: int, n: int, seed: int = 0, decay: float = 0.2) -> np.ndarray:
    """Rows whose directions matter less and less."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(np.random.default_rng(99).standard_normal((n, n)))[0]
    return ((rng.standard_normal((m, n)) * np.exp(-decay * np.arange(n))) @ turn).astype(np.float32)


def gram(x: np.ndarray) -> np.ndarray:
    return gram_of(tf.constant(x)).numpy()


def error(x: np.ndarray, q: np.ndarray) -> float:
    return float(np.linalg.norm(expand(project(tf.constant(x), q), q) - x) / np.linalg.norm(x))


def smallest(x: np.ndarray, r: int) -> float:
    return float(np.linalg.norm(np.linalg.svd(x, compute_uv=False)[r:]) / np.linalg.norm(x))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 12), st.integers(1, 16), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_the_gradient_is_that_of_autodiff(m: int, n: int, r: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = first(gram(rows(20, n)), min(r, n))
    x, g = (tf.constant(rng.standard_normal((m, n)), tf.float32) for _ in range(2))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = expand(project(x, q), q)
    ours = expand(project(g, q), q)
    np.testing.assert_allclose(ours, tape.gradient(y, x, g), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_element_types_stay(dtype: tf.DType) -> None:
    q = first(gram(rows(30, 8)), 3)
    z = project(tf.cast(rows(4, 8), dtype), q)
    assert (z.dtype, expand(z, q).dtype) == (dtype, dtype)


@pytest.mark.parametrize("m", [200, 20, 3])
def test_the_first_basis_is_the_best_for_what_it_was_made_of(m: int) -> None:
    x = rows(m, 40)
    q = first(gram(x), 8)
    assert (q.shape, q.dtype) == ((40, 8), np.float16)
    assert error(x, q) <= 1.01 * smallest(x, 8) + 1e-3
    np.testing.assert_allclose(q.astype(np.float64).T @ q, np.eye(8), atol=2e-3)


def test_renewing_follows_the_data() -> None:
    x = rows(300, 40, decay=0.3)
    far = first(gram(rows(300, 40)[:, ::-1]), 8)
    q = far
    for _ in range(4):
        q = renew_basis(gram(x), q)
    assert error(x, far) > 2 * smallest(x, 8)
    assert error(x, q) <= 1.05 * smallest(x, 8) + 1e-3


def test_coordinates_do_not_jump() -> None:
    """Other rows of the same kind: the spaces nearly agree, so do the coordinates, though eigenvectors turn freely."""
    x = rows(300, 40, decay=0.0)
    x[:, :8] *= 5.0  # eight directions alike: nothing tells one from the other
    y = np.roll(x, 1, axis=1)[:, np.r_[1:9, 0, 9:40]]
    last = first(gram(x), 8)
    new = renew_basis(gram(y), last)
    fresh = first(gram(y), 8)
    before = project(tf.constant(x), last)
    assert tf.norm(project(tf.constant(x), new) - before) <= 0.35 * tf.norm(before)
    assert tf.norm(project(tf.constant(x), fresh) - before) > tf.norm(project(tf.constant(x), new) - before)


def test_directions_without_energy_stay_as_they_are() -> None:
    x = rows(50, 12)
    x[:, 6:] = 0
    last = np.eye(12, 12, dtype=np.float16)[:, 4:8]
    new = renew_basis(gram(x), last)
    np.testing.assert_allclose(new.astype(np.float64).T @ new, np.eye(4), atol=2e-3)
    np.testing.assert_allclose(np.abs(new[6:8, 2:]), np.eye(2), atol=1e-3)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_matrix_that_says_nothing_changes_nothing(value: float) -> None:
    last = first(gram(rows(30, 8)), 3)
    empty = np.full((8, 8), value, np.float32)
    assert renew_basis(empty, last) is last
    assert first(empty, 3).tolist() == np.eye(8, 3).tolist()


def test_scale_does_not_matter() -> None:
    g = gram(rows(300, 40))
    last = first(gram(rows(300, 40, seed=5)), 8)
    for scale in (2.0**-80, 2.0**80):
        assert renew_basis(g * np.float32(scale), last).tobytes() == renew_basis(g, last).tobytes()


class TestTheRunningSum:
    @pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
    def test_what_is_not_finite_does_not_enter(self, value: float) -> None:
        g = tf.eye(2) * 2e38
        new = gram_of(tf.constant([[1.0, 0.0], [0.0, value]]))
        assert running(g, new).numpy().tolist() == g.numpy().tolist()

    def test_what_is_not_finite_does_not_stay(self) -> None:
        assert running(tf.constant([[np.nan]]), tf.constant([[4.0]])).numpy().tolist() == [[0.0]]
        assert running(tf.zeros([1, 1]), tf.constant([[4.0]])).numpy().tolist() == [[4.0]]

    def test_no_rows_say_nothing(self) -> None:
        assert not gram_of(tf.zeros([0, 3])).numpy().any()
        assert not gram_of(tf.zeros([0, 3]), rows=4).numpy().any()

    def test_a_sample_of_rows_is_taken_evenly(self) -> None:
        x = tf.one_hot([0, 1, 2, 3, 0, 1, 2, 3], 4)
        assert gram_of(x, rows=4).numpy().tolist() == np.diag([2.0, 0.0, 2.0, 0.0]).tolist()
        assert gram_of(x, rows=100).numpy().tolist() == (2 * np.eye(4)).tolist()
