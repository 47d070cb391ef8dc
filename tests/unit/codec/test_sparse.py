"""The largest numbers of each row: which they are, and that the rest is zero both ways."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec.sparse import gather, largest, scatter

ANY_FLOAT = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf])),
)


def by_sorting(x: np.ndarray, k: int) -> list[list[int]]:
    """The same by Python's sort, which keeps the order of equal ones."""

    def size(value: float) -> tuple[bool, float]:
        return (True, 0.0) if np.isnan(value) else (False, abs(value))

    ranked = [sorted(range(len(row)), key=lambda i, row=row: size(row[i]), reverse=True) for row in x.tolist()]
    return [sorted(order[:k]) for order in ranked]


@settings(deadline=None)
@given(ANY_FLOAT, st.data())
def test_the_largest_of_any_rows(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, x.shape[1]))
    positions = largest(tf.constant(x), k)
    assert (positions.dtype, positions.shape) == (np.int32, (len(x), k))
    assert positions.tolist() == by_sorting(x, k)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_element_types(dtype: tf.DType) -> None:
    x = tf.constant([[1.0, -3.0, 2.0, 0.5]], dtype)
    positions = largest(x, 2)
    assert positions.tolist() == [[1, 2]]
    values = gather(x, positions)
    assert (values.dtype, scatter(values, positions, 4).dtype) == (dtype, dtype)


def test_doubles_that_differ_by_less_than_a_float_are_told_apart() -> None:
    assert largest(tf.constant([[1.0, 1.0 + 1e-12]], tf.float64), 1).tolist() == [[1]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 8), st.integers(1, 30), st.data())
def test_what_is_scattered_is_zero_elsewhere(m: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    x = np.random.default_rng(n).standard_normal((m, n)).astype(np.float32)
    positions = largest(tf.constant(x), k)
    back = scatter(gather(tf.constant(x), positions), positions, n).numpy()
    keeps = np.zeros((m, n), bool)
    np.put_along_axis(keeps, positions.astype(np.int64), True, axis=1)
    assert back.tolist() == np.where(keeps, x, 0).tolist()
