"""Which variables `nb.split` shards, and where; and its errors for ambiguous cases."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data

X, W, V = data(6, 8), data(8, 12), data(12, 4)


def plan(step: Callable[[Any], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nb.plan(nb.function(step), tf.TensorSpec([6, 8]))


def test_split_divides_variables_read_or_created_inside() -> None:
    with nb.split(2, axis=0):
        made = tf.Variable(V, name="made")
    read = tf.Variable(W, name="read")

    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.split(2):
                hidden = x @ read
            return tf.reduce_sum(hidden @ made)

    found = plan(step)
    assert {path: found.layouts[path] for path in ("read", "made")} == {"read": "split(1)", "made": "split(0)"}
    assert [each.shards for each in found.stages.values()] == [2]


def test_split_keeps_short_variables_whole() -> None:
    """It warns if no variable is long enough."""
    small, large = tf.Variable(tf.ones([8, 2]), name="small"), tf.Variable(W, name="large")

    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(), nb.split(3, axis=1):
            return tf.reduce_sum(x @ tf.convert_to_tensor(small))

    def step_of_both(x: Any) -> Any:
        with nb.cluster(), nb.stage(), nb.split(3, axis=1):
            return tf.reduce_sum(x @ tf.convert_to_tensor(small)) + tf.reduce_sum(x @ large)

    with pytest.raises(
        nb.errors.NebulaWarning, match="its variables have at most 2 entries along axis 1, for 3 devices"
    ):
        plan(step)
    layouts = plan(step_of_both).layouts
    assert layouts["large"] == "split(1)" and "small" not in layouts


@pytest.mark.parametrize(("count", "least", "warns"), [(2, 1, True), (2, 2, False), (None, 1, False)])
def test_split_that_an_elastic_run_may_lose_is_reported(count: int | None, least: int, warns: bool) -> None:
    """Before the run has fewer workers than devices, which would end it."""
    weight = tf.Variable(W, name="weight")

    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="npu"), nb.split(count):
            return tf.reduce_sum(x @ weight)

    workers = ["127.0.0.1:7201", "127.0.0.1:7202"]
    nb.shutdown()
    with nb.init({"clusters": {"npu": {"workers": workers}}, "elastic": {"npu": {"min": least}}}):
        if not warns:
            plan(step)
            return
        with pytest.raises(
            nb.errors.NebulaWarning, match="2 workers of 'npu', but elastic: allows it to have 1"
        ) as caught:
            plan(step)
    assert "nb.split() for all workers that there are, or elastic: {npu: {min: 2}}" in str(caught.value)


def catch_option_error(step: Callable[[Any], Any]) -> str:
    with pytest.raises(nb.errors.OptionError) as error:
        plan(step)
    return str(error.value)


def test_split_with_two_counts_or_two_axes_is_refused() -> None:
    weight, other = tf.Variable(W, name="weight"), tf.Variable(V, name="other")

    def two_counts(x: Any) -> Any:
        with nb.cluster(), nb.stage():
            with nb.split(2):
                hidden = x @ weight
            with nb.split(4):
                return tf.reduce_sum(hidden @ other)

    def two_axes(x: Any) -> Any:
        with nb.cluster(), nb.stage():
            with nb.split(2):
                hidden = x @ weight
            with nb.split(2, axis=0):
                return tf.reduce_sum(hidden @ tf.transpose(weight))

    assert "nb.split has 4 devices, and at" in catch_option_error(two_counts)
    assert "nb.split divides 'weight' along axis 0, and at" in catch_option_error(two_axes)


@pytest.mark.filterwarnings("ignore::whale_nebula.errors.NebulaWarning")
def test_plan_of_a_split_without_effect_names_its_axis() -> None:
    weight = tf.Variable(W, name="weight")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.split(2, axis=5):
            return x @ weight

    with pytest.raises(nb.errors.PlanError, match=r"nb\.split that divides no variable") as caught:
        nb.plan(step, tf.TensorSpec([None, 8]))
    assert caught.value.why == "no variable with an axis 5 is read inside it"


def test_split_without_effect_warns() -> None:
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(), nb.split(2):
            return tf.reduce_sum(x * 2.0)

    with pytest.raises(nb.errors.NebulaWarning, match="has no effect"):
        plan(step)


def make_mesh_step(copies: int | None, pieces: int | None) -> Callable[[Any], Any]:
    weight = tf.Variable(W, name="weight")

    def step(x: Any) -> Any:
        with nb.cluster(["gpu"]), nb.replica(copies), nb.stage(), nb.split(pieces):
            return tf.reduce_sum(x @ weight)

    return step


FOUR = {"clusters": {"gpu": {"workers": [f"127.0.0.1:{7000 + number}" for number in range(4)]}}}


@pytest.mark.parametrize(("copies", "pieces"), [(2, None), (None, 2), (2, 2)])
def test_missing_split_or_replica_count_uses_the_remaining_workers(copies: int | None, pieces: int | None) -> None:
    with nb.init(FOUR):
        found = plan(make_mesh_step(copies, pieces))
    (stage,) = found.stages.values()
    assert (stage.replicas, stage.shards) == (2, 2)
    assert {each.times for each in found.collectives} == {1}  # of two micro-batches a replica has one


def test_replica_and_split_without_counts_are_refused() -> None:
    with nb.init(FOUR):
        assert "neither nb.replica nor the nb.split inside it, at" in catch_option_error(make_mesh_step(None, None))


def test_stages_may_have_different_splits() -> None:
    weight, other = tf.Variable(W, name="weight"), tf.Variable(V, name="other")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), tf.GradientTape() as tape:
            with nb.stage(name="one"), nb.split(2):
                hidden = tf.nn.relu(x @ weight)
            with nb.stage(name="two"), nb.split(4):
                loss = tf.reduce_mean(tf.square(hidden @ other))
        return (loss, *tape.gradient(loss, [weight, other]))

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.nn.relu(X @ weight) @ other))
    expected = (loss, *tape.gradient(loss, [weight, other]))
    for one, two in zip(expected, step(tf.constant(X)), strict=True):
        tf.debugging.assert_near(one, two, rtol=1e-5, atol=1e-6)
    assert {name: stage.shards for name, stage in nb.plan(step, X).stages.items()} == {"one": 2, "two": 4}
