"""Principal axes: the gain for the precision that follows, their transfer, and robustness."""

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.codec import INT4, Axes, Coded, axes
from whale_nebula.codec.axes import Held
from whale_nebula.codec.structures import RENEWED
from whale_nebula.errors import RemoteProtocolError

N = 64


def rows(count: int, seed: int = 0) -> np.ndarray:
    """Rows that lie mostly along some directions, as those of models do."""
    draw = np.random.default_rng(seed)
    turn = np.linalg.qr(np.random.default_rng(99).normal(size=(N, N)))[0]
    return (draw.normal(size=(count, N)) * np.geomspace(4, 0.05, N) @ turn).astype("float32")


def off(x: np.ndarray, again: np.ndarray) -> float:
    return float(np.linalg.norm(again - x) / np.linalg.norm(x))


def crossed(codec: Axes, state: Held, x: np.ndarray, precision: object) -> np.ndarray:
    reduced = codec.reduce(state, tf.constant(x))
    parts = precision.encode(reduced.numbers[0])  # type: ignore[attr-defined]
    numbers = precision.decode(parts, x.shape, "float32")  # type: ignore[attr-defined]
    return codec.expand(state, (numbers,), (), x.shape)[0].numpy()


def test_two_bits_on_its_axes_lose_less_than_three_without() -> None:
    x = rows(500)
    state, _ = Axes().refresh(Axes().init(x.shape), tf.constant(rows(500, seed=1)), 0)
    alone = Coded(3).decode(Coded(3).encode(tf.constant(x)), x.shape, "float32").numpy()
    assert off(x, crossed(Axes(), state, x, Coded(2))) < off(x, alone)
    assert off(x, crossed(Axes(), state, x, INT4())) < 0.2


def test_both_sides_have_the_same_axes_and_they_are_at_right_angles() -> None:
    codec = Axes()
    state, news = codec.refresh(codec.init((500, N)), tf.constant(rows(500)), 0)
    assert news is not None
    assert [(each.dtype.name, each.shape) for each in news] == [tuple(part) for part in codec.news((500, N))]
    there = codec.learn(codec.init((500, N)), news, (500, N))
    np.testing.assert_array_equal(state.q, there.q)
    np.testing.assert_allclose(there.q.T @ there.q, np.eye(N), atol=1e-5)
    assert there.gram is None


def test_what_is_not_rounded_comes_back() -> None:
    x = rows(100)
    state, _ = Axes().refresh(Held(), tf.constant(x), 0)
    numbers = Axes().reduce(state, tf.constant(x)).numbers
    assert off(x, Axes().expand(state, numbers, (), x.shape)[0].numpy()) < 1e-6
    spread = np.square(numbers[0].numpy()).sum(axis=0)
    assert spread[:8].sum() > 20 * spread[-32:].sum()  # the longest axes are first


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_does_not_enter_them(bad: float) -> None:
    spoilt = rows(100)
    spoilt[7, 3] = bad
    state, _ = Axes().refresh(Held(), tf.constant(spoilt), 0)
    np.testing.assert_array_equal(state.q, np.eye(N))
    for step in range(1, RENEWED + 1):
        x = spoilt if step == RENEWED else rows(100, seed=step)
        state, _ = Axes().refresh(state, tf.constant(x), step)
    assert state.found and np.isfinite(state.q).all() and not np.array_equal(state.q, np.eye(N))
    again = crossed(Axes(), state, spoilt, Coded(3))
    assert np.isnan(again[7]).all() and np.isfinite(np.delete(again, 7, axis=0)).all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_any_magnitude_has_axes(scale: float) -> None:
    state, _ = Axes().refresh(Held(), tf.constant(rows(100) * np.float32(scale)), 0)
    np.testing.assert_allclose(state.q.T @ state.q, np.eye(N), atol=1e-5)


def test_axes_that_are_none_are_refused() -> None:
    _, numbers, largest = axes.make_axes(np.eye(8, dtype="float32"))
    for bad in ((np.ones((8, 8), np.int8), largest), (numbers, np.full(8, np.nan, "float16")), (numbers * 0, largest)):
        with pytest.raises(RemoteProtocolError, match="not orthogonal"):
            axes.restore_axes(*bad)


def spiky(columns: int, times: float) -> np.ndarray:
    """Rows whose axes have one large number each, and many small ones that eight bits round alike."""
    vectors, counts = np.eye(columns) - 2 / columns, (np.arange(columns, 0, -1) * times).astype(int) + 1
    return np.repeat(vectors, counts, axis=0).astype("float32")


def test_axes_that_eight_bits_hold_badly_are_made_upright_again() -> None:
    for each in (spiky(500, 1 / 8), spiky(N, 20 / N)):
        state, _ = Axes().refresh(Held(), tf.constant(each), 0)
        np.testing.assert_allclose(state.q.T @ state.q, np.eye(each.shape[1]), atol=1e-4)


@pytest.mark.parametrize("nothing", [0.0, np.nan, np.inf])
def test_after_a_first_step_that_tells_nothing_axes_are_made_of_the_next(nothing: float) -> None:
    codec = Axes()
    state, news = codec.refresh(Held(), tf.fill([100, N], nothing), 0)
    assert news is not None and not state.found
    state, news = codec.refresh(state, tf.fill([100, N], nothing), 1)
    assert news is None
    state, news = codec.refresh(state, tf.constant(rows(100)), 2)
    assert news is not None and state.found and not np.array_equal(state.q, np.eye(N))
    x = rows(100, seed=1)
    assert off(x, crossed(codec, state, x, Coded(3))) < 0.12


def test_a_step_without_them_puts_renewing_off_by_one() -> None:
    codec, state, sent = Axes(), Held(), []
    for step in (0, RENEWED - 1, RENEWED + 1, RENEWED + 2, 2 * RENEWED, 2 * RENEWED + 1):
        state, news = codec.refresh(state, tf.constant(rows(60, seed=step)), step)
        sent += [step] * (news is not None)
    assert sent == [0, RENEWED + 1, 2 * RENEWED + 1]
