"""Assertions of a step about rows run for each micro-batch, those about all rows once, before any update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import StageFailedError

X = np.arange(6, dtype="float32")
Check = Callable[[Any, Any, Any], Any]


def make_step(check: Check, micro: int = 3) -> tuple[Any, list[tf.Variable]]:
    """A step of two stages that checks its input, what the first stage gives, and its loss."""
    variables = [tf.Variable(2.0), tf.Variable(3.0)]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro):
            with nb.stage(cluster="a"):
                hidden = x * variables[0]
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean((hidden * variables[1]) ** 2)
                checked = check(x, hidden, loss)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(1e-3 * gradient)
        return loss, checked

    return step, variables


def make_check(assertion: Callable[..., Any], choose: Callable[..., Any], limit: float) -> Check:
    def check(x: Any, hidden: Any, loss: Any) -> None:
        assertion(choose(x, hidden, loss), limit)

    return check


def choose_loss(x: Any, hidden: Any, loss: Any) -> Any:
    return loss


def assert_below(value: Any, limit: float) -> None:
    tf.debugging.Assert(value < limit, [value])


FAILING_CHECKS: dict[str, Check] = {
    "loss": make_check(tf.debugging.assert_less, choose_loss, 1.0),
    "Assert": make_check(assert_below, choose_loss, 1.0),
    "root": make_check(tf.debugging.assert_less, lambda x, hidden, loss: tf.sqrt(loss), 1.0),
    "sum": make_check(tf.debugging.assert_less, lambda x, hidden, loss: tf.reduce_sum(hidden), 1.0),
    "rows": make_check(tf.debugging.assert_less, lambda x, hidden, loss: hidden, 1.0),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.grid] if name in ("Assert", "root") else []) for name in FAILING_CHECKS],
)
def test_failing_check_restores_variables(runner: str, name: str) -> None:
    step, variables = make_step(FAILING_CHECKS[name])
    with pytest.raises(StageFailedError, match="assertion failed") as caught:
        step(X)
    place = ("b", 0) if name == "rows" else ("", None)
    assert (caught.value.stage, caught.value.micro_batch, caught.value.torn) == (*place, False)
    assert [float(variable) for variable in variables] == [2.0, 3.0]


def check_and_return_root(x: Any, hidden: Any, loss: Any) -> Any:
    root = tf.sqrt(loss)
    tf.debugging.assert_less(root, 100.0)
    return root


def check_and_return_sum(x: Any, hidden: Any, loss: Any) -> Any:
    total = tf.reduce_sum(hidden)
    with tf.control_dependencies([tf.debugging.assert_less(total, 100.0)]):
        return total * 2.0


@pytest.mark.parametrize("check", [pytest.param(check_and_return_root, marks=pytest.mark.grid), check_and_return_sum])
def test_checked_result_is_merged_over_micro_batches(runner: str, check: Check) -> None:
    plain, _ = make_step(check, micro=1)
    expected = [float(t) for t in plain(X)]
    cut, _ = make_step(check)
    assert [float(t) for t in cut(X)] == pytest.approx(expected, rel=1e-6)
    assert nb.last_report().micro_batches == 3


def check_inputs(x: Any, hidden: Any, loss: Any) -> None:
    tf.debugging.assert_equal(tf.reduce_sum(x), 15.0)
    tf.debugging.assert_equal(tf.shape(x)[0], 6)
    tf.debugging.assert_greater(tf.reduce_max(x), 4.0)
    tf.debugging.assert_non_negative(x)


def test_check_of_inputs_covers_the_whole_batch(runner: str) -> None:
    step, variables = make_step(check_inputs)
    step(X)
    assert float(variables[0]) != 2.0
    before = float(variables[0])
    with pytest.raises(StageFailedError, match="assertion failed") as caught:
        step(np.array([0, 1, 2, 3, 4.5, 4.5], "float32") * 2.0)
    assert not caught.value.torn
    assert float(variables[0]) == before


def test_check_of_input_rows_reports_their_micro_batch(runner: str) -> None:
    step, _ = make_step(make_check(tf.debugging.assert_less, lambda x, hidden, loss: x, 4.5))
    with pytest.raises(StageFailedError) as caught:
        step(X)
    assert caught.value.micro_batch == 2
