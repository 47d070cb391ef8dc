"""Messages for replicas that divide the batch: their mends leave the batch whole, or allow its division."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.passes.programs import program_of
from whale_nebula.errors import BatchCoupledError, NebulaWarning, StaticBatchError
from whale_nebula.ir.program import Pipeline
from whale_nebula.passes.batch import divides

X, Y = np.random.default_rng(0).random((8, 4), "float32"), np.ones((8, 1), "float32")


def normalised() -> keras.Model:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(keras.layers.Dense(3)(inputs))))
    model.compile("sgd", "mse")
    return model


def mends_of(*around: Any, function: Any = None) -> tuple[str, ...]:
    with pytest.raises(BatchCoupledError) as caught, opened(*around):
        nb.plan(function, X) if function is not None else nb.plan(normalised(), X, Y)
    return caught.value.mends


@contextlib.contextmanager
def opened(*scopes: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


def test_replicas_are_what_to_leave_out() -> None:
    alone, allow, *_ = mends_of(nb.replica(2))
    assert alone == "nb.replica(1), or remove nb.replica"
    assert allow.startswith('nb.pipeline(coupled="allow") inside nb.replica')


def test_replicas_and_a_pipeline() -> None:
    alone, *_ = mends_of(nb.replica(2), nb.pipeline(4))
    assert alone == "nb.replica(1) and nb.pipeline(micro_batch=1)"


def test_a_pipeline_alone() -> None:
    alone, allow, *_ = mends_of(nb.pipeline(4))
    assert alone == "nb.pipeline(micro_batch=1)" and allow.startswith('nb.pipeline(..., coupled="allow")')


def test_a_loss_that_couples_the_rows_says_so_too() -> None:
    @nb.function
    def step(x: Any) -> Any:
        weight = tf.constant(1.0)
        with nb.replica(3), nb.stage(name="all"), tf.GradientTape() as tape:
            tape.watch(weight)
            loss = tf.reduce_max(tf.sort(x, axis=0)[0] * weight)
        return tape.gradient(loss, weight)

    assert mends_of(function=step)[0] == "nb.replica(1), or remove nb.replica"


@pytest.mark.parametrize(
    "around",
    [
        pytest.param([lambda: nb.replica(1)], marks=pytest.mark.grid),
        [lambda: nb.replica(2), lambda: nb.pipeline(coupled="allow")],
    ],
)
def test_what_it_says_runs(around: Any) -> None:
    with opened(*(scope() for scope in around)):
        assert np.isfinite(normalised().fit(X, Y, verbose=0).history["loss"]).all()


def test_a_batch_size_that_is_baked_in() -> None:
    layer = keras.layers.Dense(4)

    @nb.function
    def step(x: Any) -> Any:
        with nb.replica(2), nb.stage(name="all"):
            return tf.reduce_mean(layer(x) + tf.zeros([8, 4]))

    with pytest.raises(StaticBatchError, match=re.escape("or nb.replica(1), or remove nb.replica")):
        nb.plan(step, X)


def warned(*around: Any) -> str:
    model = normalised()
    with warnings.catch_warnings(record=True) as caught, opened(*around):
        warnings.simplefilter("always")
        model.predict(X[:3], verbose=0)
    (said,) = [str(each.message) for each in caught if issubclass(each.category, NebulaWarning)]
    return said


def test_replicas_are_who_asks_for_more_micro_batches_than_there_are_rows() -> None:
    said = warned(nb.replica(5))
    assert "the 5 replicas of stage 'stage0' ask for 5 micro-batches, but the first batch has 3 rows" in said
    assert "mend: nb.replica(3), or a larger batch" in said


def test_both_may_ask_for_too_many() -> None:
    said = warned(nb.replica(5), nb.pipeline(6))
    assert "nb.pipeline asks for 6 micro-batches" in said
    assert "mend: nb.replica(3) and nb.pipeline(micro_batch=3), or a larger batch" in said


def test_a_pipeline_may_ask_for_too_many_and_replicas_not() -> None:
    assert "mend: nb.pipeline(micro_batch=3), or a larger batch" in warned(nb.replica(2), nb.pipeline(6))


# -------------------- Whether an undivided step could be divided into micro-batches
STEP = """
stages a b
%0 = input x float32[?,4]
%1 = Exp(%0) float32[?,4] @a
%2 = Const {value=(0, 1)} int32[2]
%3 = Mean(%1, %2) float32[] @b
returns %3
"""
MEETING = STEP.replace("%3 = Mean(%1, %2) float32[] @b", "%3 = MatMul(%1, %1) {transpose_b=true} float32[?,?] @b")


def test_a_mean_over_rows_may_be_cut() -> None:
    assert divides(program_of(STEP))


def test_rows_that_meet_each_other_may_not() -> None:
    assert not divides(program_of(MEETING))


@pytest.mark.parametrize(("coupled", "may"), [("allow", False), ("error", True)])
def test_a_step_that_is_cut_was_asked_before_unless_everything_was_allowed(coupled: str, may: bool) -> None:
    cut = replace(program_of(MEETING), pipeline=Pipeline(micro_batch=4, coupled=coupled))
    assert divides(cut) == may
