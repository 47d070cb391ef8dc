"""Ops with effects: Python's own, summaries, and metrics that are no sum over rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import (
    assert_same_training,
    build_functional,
    build_subclassed,
    check_error,
    find_marked_line,
    fit,
    make_batch,
)
from whale_nebula.errors import BatchCoupledError, StageFailedError


def cube_in_python(x: Any) -> Any:
    found = tf.py_function(lambda t: t * t * t, [x], tf.float32)  # mark: py
    return tf.ensure_shape(found, x.shape)


def round_in_numpy(x: Any) -> Any:
    found = tf.numpy_function(np.round, [x], tf.float32)  # mark: numpy
    return x + tf.stop_gradient(tf.ensure_shape(found, x.shape))


@pytest.mark.parametrize("middle", [pytest.param(cube_in_python, marks=pytest.mark.grid), round_in_numpy])
def test_py_function_in_a_stage_trains_as_uncut(middle: Any) -> None:
    assert_same_training(build_subclassed(middle), build_subclassed(middle, scoped=False))
    called, mark = (
        ("tf.py_function", find_marked_line("py"))
        if middle is cube_in_python
        else ("tf.numpy_function", find_marked_line("numpy"))
    )
    assert nb.last_report().notes == (
        f"{called} at {mark} cannot be moved out of stage 'b': it runs Python in the process of cluster 'b'",
    )


def test_plan_notes_that_a_py_function_cannot_be_moved() -> None:
    text = nb.plan(build_subclassed(cube_in_python), *make_batch()).to_text()
    assert f"tf.py_function at {find_marked_line('py')} cannot be moved" in text


def test_py_function_couples_micro_batches() -> None:
    said = "tf.py_function runs Python"
    check_error(
        BatchCoupledError,
        lambda: fit(build_subclassed(cube_in_python, micro=2)),
        said,
        'coupled="allow"',
        at=find_marked_line("py"),
    )


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.grid), "eager-1f1b"])
def test_py_function_gradients_over_links(schedule: str) -> None:
    """TensorFlow keeps one call's tape for a py_function: one micro-batch is in flight, whatever the schedule."""
    weight = tf.Variable(tf.ones([4, 4]) * 0.3)

    def step(micro: int) -> Any:
        @nb.function
        def gradient(x: Any) -> Any:
            pipeline = nb.pipeline(micro, schedule=schedule, coupled="allow")
            with tf.GradientTape() as tape, nb.cluster(), pipeline:
                with nb.stage(cluster="a"):
                    hidden = cube_in_python(x @ weight)
                with nb.stage(cluster="b"):
                    loss = tf.reduce_mean(hidden**2)
            return tape.gradient(loss, weight)

        return gradient(tf.constant(make_batch(6)[0]))

    whole = step(1)
    nb.shutdown()
    nb.init(links="1gbit,1ms")
    np.testing.assert_allclose(step(3), whole, rtol=1e-5)
    assert nb.last_report().micro_batches == 3


def test_py_function_error_is_reported_with_stage_and_line() -> None:
    def failing(x: Any) -> Any:
        def no(value: Any) -> Any:
            raise ValueError("python said no")

        return tf.ensure_shape(tf.py_function(no, [x], tf.float32), x.shape)  # mark: failing

    said = ("python said no", "stage 'b'", "cluster 'b'", "as they were before")
    check_error(StageFailedError, lambda: fit(build_subclassed(failing)), *said, at=find_marked_line("failing"))


def write_mean(x: Any) -> Any:
    tf.summary.scalar("mean", tf.reduce_mean(x), step=7)
    return x


def write_histogram(x: Any) -> Any:
    tf.summary.histogram("rows", x, step=7)  # mark: histogram
    return x


def read_summaries(folder: Path) -> list[tuple[int, str, Any]]:
    """Step, tag and value of all summaries in a folder."""
    found = []
    for file in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [(event.step, each.tag, tf.make_ndarray(each.tensor)) for each in event.summary.value]
    return found


def train_and_read(folder: Path, middle: Any, micro: int = 1, scoped: bool = True) -> list[tuple[int, str, Any]]:
    with tf.summary.create_file_writer(str(folder)).as_default():
        fit(build_subclassed(middle, micro, scoped))
        tf.summary.flush()
    return read_summaries(folder)


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_scalar_summary_is_written_once_for_the_batch(tmp_path: Path, micro: int) -> None:
    uncut = train_and_read(tmp_path / "uncut", write_mean, scoped=False)
    found = train_and_read(tmp_path / "cut", write_mean, micro)
    assert len(nb.last_report().stages) == 2
    assert [(step, tag.split("/")[-1]) for step, tag, _ in found] == [(7, "mean")]
    np.testing.assert_allclose(found[0][2], uncut[0][2], rtol=1e-5)


def test_histogram_summary_equals_the_uncut_one(tmp_path: Path) -> None:
    uncut, found = (
        train_and_read(tmp_path / "uncut", write_histogram, scoped=False),
        train_and_read(tmp_path / "cut", write_histogram),
    )
    assert len(found) == len(uncut) == 1
    np.testing.assert_allclose(found[0][2], uncut[0][2], rtol=1e-5, atol=1e-6)


def test_histogram_summary_with_micro_batches_is_refused(tmp_path: Path) -> None:
    said = ("a variable that the step writes", "micro_batch=1")
    check_error(
        BatchCoupledError,
        lambda: train_and_read(tmp_path, write_histogram, micro=2),
        *said,
        at=find_marked_line("histogram"),
    )


def test_summary_steps_may_be_counted_by_a_variable(tmp_path: Path) -> None:
    count = tf.Variable(0, dtype=tf.int64)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                x = x * 2.0
                tf.summary.scalar("twice", tf.reduce_mean(x), step=count)
            with nb.stage(cluster="b"):
                x = x + 1.0
        count.assign_add(1)
        return x

    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        step(tf.ones([2]))
        step(tf.ones([2]) * 2.0)
        tf.summary.flush()
    assert [(number, float(value)) for number, _, value in read_summaries(tmp_path)] == [(0, 2.0), (1, 4.0)]


class LargestMetric(keras.metrics.Metric):
    """The largest number of the last batch."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(tf.reduce_max(y_pred))  # mark: max

    def result(self) -> Any:
        return self.seen


def test_custom_coupled_metric_is_reported_with_its_line() -> None:
    model = build_functional(micro=2, metrics=[LargestMetric()])
    said = ("the value of metric 'largest'", "Max over the batch is neither a sum nor a mean")
    mend = "remove 'largest' from model.compile(metrics=[...])"
    check_error(BatchCoupledError, lambda: fit(model), *said, mend, at=find_marked_line("max"))
    check_error(BatchCoupledError, lambda: nb.plan(model, *make_batch()), *said, mend, at=find_marked_line("max"))


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.grid), True])
def test_coupled_keras_metric_is_reported_by_name(weighted: bool) -> None:
    """A correlation along the batch."""
    option = "weighted_metrics" if weighted else "metrics"
    model = build_functional(micro=2, **{option: [keras.metrics.PearsonCorrelation(axis=0, name="pearson")]})
    check_error(BatchCoupledError, lambda: fit(model), "metric 'pearson'", "remove 'pearson' from")


def test_other_metrics_or_one_micro_batch_are_accepted() -> None:
    assert np.isfinite(fit(build_functional(micro=2, metrics=["mae"]))["mae"]).all()
    assert np.isfinite(fit(build_functional(micro=1, metrics=[LargestMetric()]))["largest"]).all()


def test_coupled_writes_are_not_reported_as_metrics() -> None:
    seen, weight = tf.Variable(0.0, trainable=False), tf.Variable(2.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
            seen.assign(tf.reduce_max(x * weight))
            return x + 1.0

    check_error(BatchCoupledError, lambda: step(tf.ones([4, 2])), "a variable that the step writes: ", "micro_batch=1")
