"""Messages for replicas that divide the batch: their fixes keep the batch whole, or allow its division."""

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
from tests.unit.passes.programs import parse_program
from whale_nebula.errors import BatchCoupledError, NebulaWarning, StaticBatchError
from whale_nebula.ir.program import Pipeline
from whale_nebula.passes.batch import is_divisible

X, Y = np.random.default_rng(0).random((8, 4), "float32"), np.ones((8, 1), "float32")


def make_batch_norm_model() -> keras.Model:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(keras.layers.Dense(3)(inputs))))
    model.compile("sgd", "mse")
    return model


def list_fixes(*around: Any, function: Any = None) -> tuple[str, ...]:
    with pytest.raises(BatchCoupledError) as caught, open_scopes(*around):
        nb.plan(function, X) if function is not None else nb.plan(make_batch_norm_model(), X, Y)
    return caught.value.mends


@contextlib.contextmanager
def open_scopes(*scopes: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


def test_fixes_for_replicas_remove_nb_replica() -> None:
    alone, allow, *_ = list_fixes(nb.replica(2))
    assert alone == "nb.replica(1), or remove nb.replica"
    assert allow.startswith('nb.pipeline(coupled="allow") inside nb.replica')


def test_fix_for_replicas_and_a_pipeline_changes_both() -> None:
    alone, *_ = list_fixes(nb.replica(2), nb.pipeline(4))
    assert alone == "nb.replica(1) and nb.pipeline(micro_batch=1)"


def test_fixes_for_a_pipeline_change_its_micro_batches() -> None:
    alone, allow, *_ = list_fixes(nb.pipeline(4))
    assert alone == "nb.pipeline(micro_batch=1)" and allow.startswith('nb.pipeline(..., coupled="allow")')


def test_coupled_loss_has_the_same_fixes() -> None:
    @nb.function
    def step(x: Any) -> Any:
        weight = tf.constant(1.0)
        with nb.replica(3), nb.stage(name="all"), tf.GradientTape() as tape:
            tape.watch(weight)
            loss = tf.reduce_max(tf.sort(x, axis=0)[0] * weight)
        return tape.gradient(loss, weight)

    assert list_fixes(function=step)[0] == "nb.replica(1), or remove nb.replica"


@pytest.mark.parametrize(
    "around",
    [
        pytest.param([lambda: nb.replica(1)], marks=pytest.mark.grid),
        [lambda: nb.replica(2), lambda: nb.pipeline(coupled="allow")],
    ],
)
def test_fixes_run(around: Any) -> None:
    with open_scopes(*(scope() for scope in around)):
        assert np.isfinite(make_batch_norm_model().fit(X, Y, verbose=0).history["loss"]).all()


def test_static_batch_size_error_suggests_one_replica() -> None:
    layer = keras.layers.Dense(4)

    @nb.function
    def step(x: Any) -> Any:
        with nb.replica(2), nb.stage(name="all"):
            return tf.reduce_mean(layer(x) + tf.zeros([8, 4]))

    with pytest.raises(StaticBatchError, match=re.escape("or nb.replica(1), or remove nb.replica")):
        nb.plan(step, X)


def predict_with_warning(*around: Any) -> str:
    model = make_batch_norm_model()
    with warnings.catch_warnings(record=True) as caught, open_scopes(*around):
        warnings.simplefilter("always")
        model.predict(X[:3], verbose=0)
    (message,) = [str(each.message) for each in caught if issubclass(each.category, NebulaWarning)]
    return message


def test_warning_for_more_replicas_than_rows_names_the_stage() -> None:
    message = predict_with_warning(nb.replica(5))
    assert "the 5 replicas of stage 'stage0' ask for 5 micro-batches, but the first batch has 3 rows" in message
    assert "mend: nb.replica(3), or a larger batch" in message


def test_warning_for_too_few_rows_covers_replicas_and_pipeline() -> None:
    message = predict_with_warning(nb.replica(5), nb.pipeline(6))
    assert "nb.pipeline asks for 6 micro-batches" in message
    assert "mend: nb.replica(3) and nb.pipeline(micro_batch=3), or a larger batch" in message


def test_warning_for_too_few_rows_covers_the_pipeline_alone() -> None:
    assert "mend: nb.pipeline(micro_batch=3), or a larger batch" in predict_with_warning(nb.replica(2), nb.pipeline(6))


# -------------------- Whether an undivided step could be divided into micro-batches
STEP = """
stages a b
%0 = input x float32[?,4]
%1 = Exp(%0) float32[?,4] @a
%2 = Const {value=(0, 1)} int32[2]
%3 = Mean(%1, %2) float32[] @b
returns %3
"""
COUPLED_STEP = STEP.replace("%3 = Mean(%1, %2) float32[] @b", "%3 = MatMul(%1, %1) {transpose_b=true} float32[?,?] @b")


def test_divides_is_true_for_a_mean_over_rows() -> None:
    assert is_divisible(parse_program(STEP))


def test_divides_is_false_for_coupled_rows() -> None:
    assert not is_divisible(parse_program(COUPLED_STEP))


@pytest.mark.parametrize(("coupled", "may"), [("allow", False), ("error", True)])
def test_divides_depends_on_coupled_for_a_divided_step(coupled: str, may: bool) -> None:
    cut = replace(parse_program(COUPLED_STEP), pipeline=Pipeline(micro_batch=4, coupled=coupled))
    assert is_divisible(cut) == may
