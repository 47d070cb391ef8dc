"""Principal axes: the gain for the precision that follows, their transfer, and robustness."""

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.codec import INT4, Axes, Coded, axes
from whale_nebula.codec.axes import Held
from whale_nebula.codec.structures import RENEWAL_STEPS
from whale_nebula.errors import RemoteProtocolError

N = 64


def rows(count: int, seed: int = 0) -> np.ndarray:
    """Rows that lie mostly along some directions, as those of models do."""
    draw = np.random.default_rng(seed)
    turn = np.linalg.qr(np.random.default_rng(99).normal(size=(N, N)))[0]
    return (draw.normal(size=(count, N)) * np.geomspace(4, 0.05, N) @ turn).astype("float32")


def relative_error(x: np.ndarray, restored: np.ndarray) -> float:
    return float(np.linalg.norm(restored - x) / np.linalg.norm(x))


def round_trip(codec: Axes, state: Held, x: np.ndarray, precision: object) -> np.ndarray:
    reduced = codec.reduce(state, tf.constant(x))
    parts = precision.encode(reduced.numbers[0])  # type: ignore[attr-defined]
    numbers = precision.decode(parts, x.shape, "float32")  # type: ignore[attr-defined]
    return codec.expand(state, (numbers,), (), x.shape)[0].numpy()


def test_axes_two_bits_lose_less_than_three_bits_without_axes() -> None:
    x = rows(500)
    state, _ = Axes().refresh(Axes().init(x.shape), tf.constant(rows(500, seed=1)), 0)
    alone = Coded(3).decode(Coded(3).encode(tf.constant(x)), x.shape, "float32").numpy()
    assert relative_error(x, round_trip(Axes(), state, x, Coded(2))) < relative_error(x, alone)
    assert relative_error(x, round_trip(Axes(), state, x, INT4())) < 0.2


def test_axes_are_orthonormal_and_equal_on_both_sides() -> None:
    codec = Axes()
    state, news = codec.refresh(codec.init((500, N)), tf.constant(rows(500)), 0)
    assert news is not None
    assert [(each.dtype.name, each.shape) for each in news] == [tuple(part) for part in codec.news((500, N))]
    there = codec.learn(codec.init((500, N)), news, (500, N))
    np.testing.assert_array_equal(state.q, there.q)
    np.testing.assert_allclose(there.q.T @ there.q, np.eye(N), atol=1e-5)
    assert there.gram is None


def test_axes_restore_unquantised_numbers() -> None:
    x = rows(100)
    state, _ = Axes().refresh(Held(), tf.constant(x), 0)
    numbers = Axes().reduce(state, tf.constant(x)).numbers
    assert relative_error(x, Axes().expand(state, numbers, (), x.shape)[0].numpy()) < 1e-6
    spread = np.square(numbers[0].numpy()).sum(axis=0)
    assert spread[:8].sum() > 20 * spread[-32:].sum()  # the longest axes are first


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_axes_ignore_nonfinite_rows(bad: float) -> None:
    spoilt = rows(100)
    spoilt[7, 3] = bad
    state, _ = Axes().refresh(Held(), tf.constant(spoilt), 0)
    np.testing.assert_array_equal(state.q, np.eye(N))
    for step in range(1, RENEWAL_STEPS + 1):
        x = spoilt if step == RENEWAL_STEPS else rows(100, seed=step)
        state, _ = Axes().refresh(state, tf.constant(x), step)
    assert state.found and np.isfinite(state.q).all() and not np.array_equal(state.q, np.eye(N))
    restored = round_trip(Axes(), state, spoilt, Coded(3))
    assert np.isnan(restored[7]).all() and np.isfinite(np.delete(restored, 7, axis=0)).all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_axes_are_orthonormal_at_any_magnitude(scale: float) -> None:
    state, _ = Axes().refresh(Held(), tf.constant(rows(100) * np.float32(scale)), 0)
    np.testing.assert_allclose(state.q.T @ state.q, np.eye(N), atol=1e-5)


def test_invalid_axes_are_refused() -> None:
    _, numbers, largest = axes.make_axes(np.eye(8, dtype="float32"))
    for bad in ((np.ones((8, 8), np.int8), largest), (numbers, np.full(8, np.nan, "float16")), (numbers * 0, largest)):
        with pytest.raises(RemoteProtocolError, match="not orthogonal"):
            axes.restore_axes(*bad)


def spiky_rows(columns: int, times: float) -> np.ndarray:
    """Rows whose axes have one large number each, and many small ones that eight bits round alike."""
    vectors, counts = np.eye(columns) - 2 / columns, (np.arange(columns, 0, -1) * times).astype(int) + 1
    return np.repeat(vectors, counts, axis=0).astype("float32")


def test_axes_are_orthonormal_after_coarse_quantisation() -> None:
    for each in (spiky_rows(500, 1 / 8), spiky_rows(N, 20 / N)):
        state, _ = Axes().refresh(Held(), tf.constant(each), 0)
        np.testing.assert_allclose(state.q.T @ state.q, np.eye(each.shape[1]), atol=1e-4)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_axes_are_computed_from_the_first_step_with_finite_data(value: float) -> None:
    codec = Axes()
    state, news = codec.refresh(Held(), tf.fill([100, N], value), 0)
    assert news is not None and not state.found
    state, news = codec.refresh(state, tf.fill([100, N], value), 1)
    assert news is None
    state, news = codec.refresh(state, tf.constant(rows(100)), 2)
    assert news is not None and state.found and not np.array_equal(state.q, np.eye(N))
    x = rows(100, seed=1)
    assert relative_error(x, round_trip(codec, state, x, Coded(3))) < 0.12


def test_skipped_step_delays_renewal_of_axes() -> None:
    codec, state, sent = Axes(), Held(), []
    for step in (0, RENEWAL_STEPS - 1, RENEWAL_STEPS + 1, RENEWAL_STEPS + 2, 2 * RENEWAL_STEPS, 2 * RENEWAL_STEPS + 1):
        state, news = codec.refresh(state, tf.constant(rows(60, seed=step)), step)
        sent += [step] * (news is not None)
    assert sent == [0, RENEWAL_STEPS + 1, 2 * RENEWAL_STEPS + 1]
