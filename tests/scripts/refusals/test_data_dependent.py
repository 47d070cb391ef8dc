"""Python that needs the value of a tensor: `if`, `for`, `float()`, `.numpy()`, NumPy. In a `call` AutoGraph is off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.telling import fit, marked, same_training, sub, told
from whale_nebula.errors import CaptureError, DataDependentError


def branching(x: Any) -> Any:
    if tf.reduce_sum(x) > 0:  # mark: if
        return x
    return -x


def halving(x: Any) -> Any:
    while tf.reduce_max(x) > 1.0:  # mark: while
        x = x / 2.0
    return x


def walking(x: Any) -> Any:
    return tf.stack([row + 1.0 for row in x])  # mark: for


def floating(x: Any) -> Any:
    return x * float(tf.reduce_sum(x))  # mark: float


def counting(x: Any) -> Any:
    return sum(x for _ in range(tf.size(x)))  # mark: range


def reading(x: Any) -> Any:
    return x * x.numpy()  # mark: numpy


def averaging(x: Any) -> Any:
    return x * np.mean(x)  # mark: mean


@pytest.mark.parametrize(
    ("middle", "mark", "mend"),
    [
        (branching, "if", "tf.cond"),
        (halving, "while", "tf.while_loop"),
        (walking, "for", "tf.map_fn"),
        (floating, "float", "tf.cast(t, tf.float32)"),
        (counting, "range", "tf.range(n)"),
        (reading, "numpy", "leave .numpy() out"),
        (averaging, "mean", "tf.reduce_mean"),
    ],
)
def test_a_value_that_is_not_there_yet(middle: Any, mark: str, mend: str) -> None:
    places = {name: marked(name) for name in ("if", "while", "for", "float", "range", "numpy", "mean")}
    error = told(DataDependentError, lambda: fit(sub(middle)), "value", mend, at=places[mark])
    assert len(str(error).splitlines()) == 3, "TensorFlow's advice for other cases is left out"


def test_under_nb_function_autograph_does_it() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                if tf.reduce_sum(x) > 0:
                    x = -x
            with nb.stage(cluster="b"):
                return x + 1.0

    assert step(tf.ones([2])).numpy().tolist() == [0.0, 0.0]
    assert step(-tf.ones([2])).numpy().tolist() == [0.0, 0.0]
    assert len(nb.last_report().stages) == 2


def test_the_mend_works() -> None:
    def mended(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x) * tf.reduce_mean(x)

    same_training(sub(mended), sub(mended, scoped=False))


def test_numpy_under_nb_function_is_told_at_the_line_as_it_was_written() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return x * np.mean(x)  # mark: rewritten

    told(DataDependentError, lambda: step(tf.ones([2])), "tf.reduce_mean", at=marked("rewritten"))


def test_what_tensorflow_does_not_take_is_ours_and_still_a_value_error() -> None:
    def mistaken(x: Any) -> Any:
        return tf.matmul(x, tf.ones([3, 3]))  # mark: matmul

    error = told(CaptureError, lambda: fit(sub(mistaken)), "Dimensions must be equal", at=marked("matmul"))
    assert isinstance(error, ValueError)
    assert "x float32[None, 4]" in error.why


def test_what_the_user_raises_passes() -> None:
    class Mine(Exception):
        pass

    def raising(x: Any) -> Any:
        raise Mine("no")

    with pytest.raises(Mine, match="no") as caught:
        fit(sub(raising))
    assert any("while the step was captured" in note for note in caught.value.__notes__)
