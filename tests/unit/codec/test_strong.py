"""The rows of the largest norms: which they are, that the rest is zero, and what others may not send."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec import INT1, INT2, Mixed, Rows
from whale_nebula.codec.sizes import fitting, parts_of
from whale_nebula.codec.strong import place_rows, strongest, take_rows
from whale_nebula.errors import RemoteProtocolError

MATRICES = hnp.arrays(
    "float32", hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-9, 9, width=16)
)


@given(MATRICES, st.data())
@settings(max_examples=40, deadline=None)
def test_no_row_that_is_left_out_is_larger_than_one_that_is_kept(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(x)))
    marks, norms = strongest(tf.constant(x), k), (x.astype("float64") ** 2).sum(axis=1)
    assert marks.sum() == k
    assert norms[marks].min() >= norms[~marks].max(initial=0)
    again = place_rows(take_rows(tf.constant(x), marks), marks).numpy()
    np.testing.assert_array_equal(again, np.where(marks[:, None], x, 0))


def test_of_equal_rows_the_first_are_kept() -> None:
    assert strongest(tf.ones([4, 2]), 2).tolist() == [True, True, False, False]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_never_left_out(bad: float) -> None:
    x = np.full((4, 2), 1e30, "float32")
    x[3, 1] = bad
    assert strongest(tf.constant(x), 1).tolist() == [False, False, False, True]


def test_a_tensor_of_any_rank_becomes_the_parts_that_were_foretold() -> None:
    codec, x = Rows(0.3), tf.random.stateless_normal([4, 5, 6], [1, 2])
    reduced = codec.reduce(None, x)
    assert [tuple(each.shape) for each in reduced.numbers] == list(codec.numbers((4, 5, 6)) or ()) == [(6, 6)]
    assert [(each.dtype.name, each.shape) for each in reduced.extras] == [tuple(p) for p in codec.extras((4, 5, 6))]
    back, residue = codec.expand(None, reduced.numbers, reduced.extras, (4, 5, 6))
    assert residue is None and back.shape == x.shape
    assert np.count_nonzero(np.any(back.numpy() != 0, axis=-1)) == 6
    assert [part.nbytes for part in parts_of(codec >> INT2(), "float32", (4, 5, 128))] == [12, 6 * 32, 8, 3]


def test_where_all_rows_are_kept_the_precision_does_it_alone() -> None:
    assert fitting(Rows(1.0) >> INT2(), "float32", (64, 128)) == INT2()
    assert fitting(Rows(0.5) >> INT2(), "float32", (64, 128)) == Rows(0.5) >> INT2()
    assert fitting(Rows(0.5) >> INT2(), "float32", (1, 128)) == INT2()


def test_a_choice_of_more_rows_than_came_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="2 rows came under a mask that marks 3"):
        place_rows(tf.ones([2, 3]), np.ones(3, np.bool_))
    with pytest.raises(RemoteProtocolError):
        Rows(0.5).expand(None, [tf.ones([2, 8])], [np.array([0b11110111], np.uint8)], (4, 8))


# ---------------------------------------------------------------------- two bits for these rows, one for the others
def uneven(rows: int = 40, columns: int = 128) -> np.ndarray:
    draw = np.random.default_rng(0)
    return (draw.standard_normal((rows, columns)) * np.exp(2 * draw.standard_normal((rows, 1)))).astype("float32")


def crossed(codec: Mixed, x: np.ndarray, key: object = None) -> np.ndarray:
    sent = [np.asarray(part) for part in codec.encode(tf.constant(x), key)]
    assert [(part.dtype.name, part.shape) for part in sent] == [tuple(part) for part in codec.parts(x.shape, "float32")]
    return np.asarray(codec.decode(sent, x.shape, "float32"))


def test_strong_rows_have_two_bits_and_weak_ones_one() -> None:
    x, key = uneven(), tf.constant([1, 2], tf.uint32)
    marks, back = strongest(tf.constant(x), 16), crossed(Mixed(0.4), x)
    for codec, rows in ((INT2(), marks), (INT1(), ~marks)):
        due = codec.decode(codec.encode(tf.constant(x[rows])), x[rows].shape, "float32")
        np.testing.assert_array_equal(back[rows], due)
    gradient = crossed(Mixed(0.4), x, key)
    assert np.linalg.norm(gradient - x) < 0.42 * np.linalg.norm(x)
    assert (gradient * x).sum() == pytest.approx((x * x).sum(), rel=0.004)


@pytest.mark.parametrize("dims", [(1, 8), (3,), (2, 3, 40), (0, 8), (5, 0)])
def test_mixed_rows_of_any_sizes_cross(dims: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).standard_normal(dims).astype("float32")
    assert crossed(Mixed(0.5), x).shape == x.shape


def test_what_marks_another_number_of_rows_is_refused() -> None:
    x = uneven(8, 64)
    marks, *rest = (np.asarray(part) for part in Mixed(0.5).encode(tf.constant(x)))
    with pytest.raises(RemoteProtocolError, match="8 of 8 rows are marked, where 4 were due"):
        Mixed(0.5).decode([np.full_like(marks, 255), *rest], x.shape, "float32")
