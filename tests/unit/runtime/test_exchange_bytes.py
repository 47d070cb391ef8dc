"""Bytes that clusters exchange once a step: equal in plan, simulation and report."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import whale_nebula as nb

TABLE, WIDTH = 50, 4

Lookup = Callable[[Any, Any], Any]


def look_up_ids(table: Any, ids: Any) -> Any:
    """A row of the table for each index: several for a row of the batch."""
    return tf.reduce_mean(tf.gather(table, ids), 1)


def look_up_positions(table: Any, ids: Any) -> Any:
    """The same rows whatever the batch is."""
    return tf.reduce_mean(tf.gather(table, tf.range(3)), 0) + 0.0 * tf.cast(ids[:, :1], tf.float32)


def look_up_unique_ids(table: Any, ids: Any) -> Any:
    """As many rows as there are different indices."""
    found = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.gather(tf.gather(table, found.y), tf.reshape(found.idx, tf.shape(ids)))
    return tf.reduce_mean(rows, 1)


def multiply_table(table: Any, ids: Any) -> Any:
    """A dense gradient: the table itself is multiplied with."""
    return tf.one_hot(ids[:, 0], TABLE) @ table


def make_training_step(first: Lookup, second: Lookup, micro_batches: int) -> Any:
    table = tf.Variable(tf.ones([TABLE, WIDTH]))

    @nb.function
    def step(many: Any, one: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batches, coupled="allow"):
            with nb.stage(cluster="x"):
                hidden = first(table, many)
            with nb.stage(cluster="y"):
                hidden = hidden * second(table, one)
            loss = tf.reduce_mean(tf.square(hidden))
        gradient = tape.gradient(loss, table)
        table.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


@functools.cache
def run_three_steps(first: Lookup, second: Lookup, rows: int, micro_batches: int) -> tuple[nb.Plan, nb.Report]:
    """The plan of a step, and the report of its third."""
    step = make_training_step(first, second, micro_batches)
    batch = tf.reshape(tf.range(rows * 5) % TABLE, [rows, 5]), tf.zeros([rows, 2], tf.int32)
    with nb.init(links="1gbit,1ms"):
        plan = nb.plan(step, *batch)
        for _ in range(3):
            step(*batch)
        return plan, nb.last_report()


@pytest.mark.parametrize(
    ("first", "second", "rows", "micro_batches"),
    [
        pytest.param(look_up_ids, look_up_ids, 8, 1, marks=pytest.mark.grid),
        (look_up_ids, look_up_ids, 9, 2),
        pytest.param(look_up_positions, look_up_ids, 8, 2, marks=pytest.mark.grid),
        (multiply_table, look_up_ids, 8, 2),
        pytest.param(multiply_table, multiply_table, 8, 1, marks=pytest.mark.grid),
    ],
)
def test_plan_prediction_and_report_have_equal_bytes(
    first: Lookup, second: Lookup, rows: int, micro_batches: int
) -> None:
    plan, report = run_three_steps(first, second, rows, micro_batches)
    assert report.prediction is not None
    measured = {name: link.bytes for name, link in report.links.items()}
    assert {name: link.wire_bytes for name, link in plan.links.items()} == measured
    assert {name: link.bytes for name, link in report.prediction.links.items()} == measured
    assert {name: link.bytes for name, link in plan.links.items()} == {
        name: link.payload_bytes for name, link in report.links.items()
    }
    assert not any(link.at_most for link in plan.links.values())


def test_table_gradient_has_a_row_for_each_index() -> None:
    plan, _ = run_three_steps(look_up_ids, look_up_ids, 9, 2)
    row = 4 * WIDTH + 4  # a row of the gradient, and its index
    assert plan.tied[0].link_bytes == {"x->y": 9 * 5 * row, "y->x": 9 * 2 * row}
    assert plan.links["x->y"].bytes == 9 * 4 * WIDTH + 9 * 5 * row
    assert plan.exchange_seconds > 0.001


def test_bytes_that_depend_on_values_are_upper_bounds() -> None:
    plan, report = run_three_steps(look_up_unique_ids, look_up_ids, 16, 1)
    assert plan.links["x->y"].at_most and plan.tied[0].at_most and not plan.links["y->x"].at_most
    assert re.search(r"x->y +1000mbit, 1ms +at most 1.8 KiB", plan.to_text())
    assert "that adds at most 640 B on y->x and 1.6 KiB on x->y" in plan.to_text()
    assert report.links["x->y"].bytes < plan.links["x->y"].wire_bytes


def test_global_norm_takes_one_frame_in_each_direction() -> None:
    inputs = hidden = keras.Input((4,))
    with nb.cluster():
        for cluster in ("x", "y"):
            with nb.stage(cluster=cluster):
                for _ in range(3):
                    hidden = keras.layers.Dense(4)(hidden)
    model = keras.Model(inputs, hidden)
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse")
    x, y = tf.ones([8, 4]), tf.zeros([8, 4])
    with nb.init(links="1gbit,1ms"):
        plan = nb.plan(model, x, y)
        model.fit(x, y, epochs=3, verbose=0)
        report = nb.last_report()
    assert {name: link.frames for name, link in report.links.items()} == {"x->y": 2, "y->x": 3}
    assert report.links["x->y"].payload_bytes == 8 * 4 * 4 + 6 * 4  # the boundary, and a share of each variable
    assert {name: link.wire_bytes for name, link in plan.links.items()} == {
        name: link.bytes for name, link in report.links.items()
    }
