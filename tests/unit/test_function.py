"""`nb.function`: what it wraps, and errors of invalid uses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NebulaWarning, OptionError


def test_function_wraps_callable_objects() -> None:
    class DoublingCallable:
        def __call__(self, x: Any) -> Any:
            with nb.stage(cluster="gpu"):
                return x * 2.0

    wrapped = nb.function(DoublingCallable())
    assert wrapped(tf.ones([2])).numpy().tolist() == [2.0, 2.0]
    assert wrapped.step.name == "DoublingCallable"


def test_function_refuses_non_callables() -> None:
    with pytest.raises(OptionError, match="takes a function, not int 3") as caught:
        nb.function(3)
    assert "test_function.py" in caught.value.where


def test_whole_option_is_validated_against_arguments() -> None:
    def step(x: Any, table: Any) -> Any:
        return x + tf.reduce_sum(table)

    assert nb.function(step, whole=("table",)).step.whole == {"table"}
    assert nb.function(lambda **tables: tables, whole=("any",)).step.whole == {"any"}
    with pytest.raises(OptionError, match="names 'tabel', but step has no such argument") as caught:
        nb.function(step, whole=("tabel",))
    assert caught.value.mend == "did you mean 'table'?"
    with pytest.raises(OptionError, match="is a string") as caught:
        nb.function(whole="table")
    assert "test_function.py" in caught.value.where


def test_call_with_missing_arguments_names_the_function() -> None:
    @nb.function
    def step(x: Any, rate: Any) -> Any:
        return x * rate

    with pytest.raises(TypeError, match=r"step\(x: 'Any', rate: 'Any'\).*missing a required argument: 'rate'"):
        step(tf.ones([2]))


def test_non_numeric_loss_weight_is_refused() -> None:
    weight = tf.Variable(2.0)

    def step(given: Any) -> Any:
        @nb.function
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2), nb.stage(cluster="gpu"):
                nb.loss_weight(given)
                loss = tf.reduce_mean(x * weight)
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

        return run(tf.constant([1.0, 2.0, 3.0, 6.0]))

    with pytest.raises(OptionError, match="the argument is not numeric") as caught:
        step("rows")
    assert "test_function.py" in caught.value.where
    assert float(step(1.0)) == 6.0
    assert float(weight) == -1.0


def test_step_is_replanned_in_another_run() -> None:
    """What was planned over free links does not run on after links were given a rate."""

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="gpu"):
                hidden = 2.0 * x
            with nb.stage(cluster="npu"):
                return hidden + 1.0

    nb.shutdown()
    assert step(tf.constant([1.0])).numpy().tolist() == [3.0]
    assert nb.last_report().stages["gpu"].compute_seconds is None
    nb.shutdown()
    nb.init(links="10gbit,0ms")
    assert step(tf.constant([1.0])).numpy().tolist() == [3.0]
    assert nb.last_report().stages["gpu"].compute_seconds is not None
    nb.shutdown()


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_function_without_a_stage_warns_once(micro_batch: int) -> None:
    @nb.function
    def double(x: Any) -> Any:
        with nb.pipeline(micro_batch=micro_batch):
            return x * 2.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 2, 3):
            assert double(tf.ones([rows])).numpy().tolist() == [2.0] * rows
    nebula_warnings = [each for each in caught if issubclass(each.category, NebulaWarning)]
    assert len(nebula_warnings) == (micro_batch == 1)
    if nebula_warnings:
        assert nebula_warnings[0].filename == __file__
        assert "double under @nb.function runs uncut" in str(nebula_warnings[0].message)


def test_nested_function_is_part_of_the_outer_one() -> None:
    @nb.function
    def double(x: Any) -> Any:
        return x * 2.0

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="gpu"):
            return double(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        assert step(tf.ones([2])).numpy().tolist() == [2.0, 2.0]
