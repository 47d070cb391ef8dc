"""The differences between two runs, and their tolerances."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.plan.verification import (
    BITS,
    EXACT,
    HALF,
    Runs,
    State,
    Tolerance,
    compare_tensors,
    distance,
    noise,
    nudge,
)

WEIGHT = tf.constant(np.linspace(-100.0, 100.0, 64), tf.float32)
UPDATE = tf.constant(np.cos(np.arange(64.0)) * 1e-2, tf.float32)


def create_runs(share: float, rounding: float = 0.0, returned: Any = ()) -> Runs:
    """The plan makes the uncut step's update, times `share`."""
    before, uncut, planned = {"w": WEIGHT}, {"w": WEIGHT + UPDATE}, {"w": WEIGHT + share * UPDATE}
    pairs = list(zip(*returned, strict=True)) if returned else [(), ()]
    return Runs(before, State(pairs[0], uncut), State(pairs[1], planned), {"w": rounding})


@pytest.mark.parametrize(("share", "tolerance", "ok"), [
    (1.0, EXACT, True), (1.02, EXACT, False), (0.0, EXACT, False), (1.005, HALF, True), (1.1, HALF, False),
    (0.0, HALF, False),
])  # fmt: skip
def test_variable_is_compared_by_its_update(share: float, tolerance: Tolerance, ok: bool) -> None:
    """1e-5 of these weights would hide an update that is two hundredths too long."""
    (row,) = compare_tensors([], create_runs(share), tolerance)
    assert row.ok is ok
    assert not row.noisy
    assert row.limit < 1e-5 * np.linalg.norm(WEIGHT)


def test_rounding_is_tolerated_and_noisy_rows_are_marked() -> None:
    length = float(np.linalg.norm(UPDATE))
    (some,) = compare_tensors([], create_runs(1.02, rounding=length / 100), EXACT)
    (all_of_it,) = compare_tensors([], create_runs(-1.0, rounding=length), EXACT)
    assert (some.ok, some.noisy) == (True, False)
    assert (all_of_it.ok, all_of_it.noisy) == (True, True)


def test_change_of_an_untouched_variable_is_a_difference() -> None:
    same = Runs({"w": WEIGHT}, State((), {"w": WEIGHT}), State((), {"w": WEIGHT}))
    moved = Runs({"w": WEIGHT}, State((), {"w": WEIGHT}), State((), {"w": WEIGHT * 1.001}))
    assert [row.ok for one in (same, moved) for row in compare_tensors([], one, EXACT)] == [True, False]


@pytest.mark.parametrize(("a", "b", "far"), [
    ([1.0, math.nan, math.inf], [1.5, math.nan, math.inf], 0.5),
    ([1.0, 2.0], [1.0, math.nan], math.inf),
    ([math.nan], [1.0], math.inf),
    ([math.inf], [-math.inf], math.inf),
    (math.nan, math.nan, 0.0),
    ([1.0], [1.0, 2.0], math.inf),
])  # fmt: skip
def test_distance_treats_equal_nan_and_infinity_as_equal(a: Any, b: Any, far: float) -> None:
    assert distance(tf.constant(a), tf.constant(b)) == far


def test_limit_is_finite_even_for_nan() -> None:
    nan, one = tf.constant(math.nan), tf.constant(1.0)
    rows = list(compare_tensors(["nan", "one"], create_runs(1.0, returned=[(nan, nan), (one, one * 1.5)]), EXACT))
    assert [row.ok for row in rows] == [True, False, True]
    assert all(math.isfinite(row.limit) for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_nudge_changes_values_by_a_bit(dtype: str) -> None:
    value = tf.cast(WEIGHT, dtype)
    moved = [tf.cast(nudge(value, BITS[dtype], seed) - value, "float64") for seed in (0, 0, 1)]
    far = np.abs(moved[0]) / np.abs(tf.cast(value, "float64"))
    assert (far > 0).all()
    assert far.max() <= 2 * BITS[dtype]
    np.testing.assert_array_equal(moved[0], moved[1])
    assert np.any(moved[0] != moved[2])


def test_noise_is_the_difference_of_updates() -> None:
    near, after = {"w": WEIGHT + 1.0}, {"w": WEIGHT + 1.0 + 2.0 * UPDATE}
    found = noise({"w": WEIGHT}, {"w": WEIGHT + UPDATE}, near, after)
    assert found["w"] == pytest.approx(float(np.linalg.norm(UPDATE)), rel=1e-2)
