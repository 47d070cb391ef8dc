"""Ops with effects: Python's own, summaries, and metrics that are no sum over rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import batch, fit, functional, marked, same_training, sub, told
from whale_nebula.errors import BatchCoupledError, StageFailedError


def cubed(x: Any) -> Any:
    found = tf.py_function(lambda t: t * t * t, [x], tf.float32)  # mark: py
    return tf.ensure_shape(found, x.shape)


def rounded(x: Any) -> Any:
    found = tf.numpy_function(np.round, [x], tf.float32)  # mark: numpy
    return x + tf.stop_gradient(tf.ensure_shape(found, x.shape))


@pytest.mark.parametrize("middle", [cubed, rounded])
def test_python_in_a_stage_learns_the_same(middle: Any) -> None:
    same_training(sub(middle), sub(middle, scoped=False))
    called, mark = ("tf.py_function", marked("py")) if middle is cubed else ("tf.numpy_function", marked("numpy"))
    assert nb.last_report().notes == (
        f"{called} at {mark} cannot be moved out of stage 'b': it runs Python in the process of cluster 'b'",
    )


def test_the_plan_says_it_before_anything_runs() -> None:
    text = nb.plan(sub(cubed), *batch()).to_text()
    assert f"tf.py_function at {marked('py')} cannot be moved" in text


def test_what_python_does_to_rows_nobody_knows() -> None:
    said = "tf.py_function runs Python"
    told(BatchCoupledError, lambda: fit(sub(cubed, micro=2)), said, 'coupled="allow"', at=marked("py"))


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_gradients_of_python_over_links(schedule: str) -> None:
    """TensorFlow keeps one call's tape for a py_function: one micro-batch is in flight, whatever the schedule."""
    weight = tf.Variable(tf.ones([4, 4]) * 0.3)

    def step(micro: int) -> Any:
        @nb.function
        def gradient(x: Any) -> Any:
            pipeline = nb.pipeline(micro, schedule=schedule, coupled="allow")
            with tf.GradientTape() as tape, nb.cluster(), pipeline:
                with nb.stage(cluster="a"):
                    hidden = cubed(x @ weight)
                with nb.stage(cluster="b"):
                    loss = tf.reduce_mean(hidden**2)
            return tape.gradient(loss, weight)

        return gradient(tf.constant(batch(6)[0]))

    whole = step(1)
    nb.shutdown()
    nb.init(links="1gbit,1ms")
    np.testing.assert_allclose(step(3), whole, rtol=1e-5)
    assert nb.last_report().micro_batches == 3


def test_what_python_raises_is_told_with_stage_and_line() -> None:
    def failing(x: Any) -> Any:
        def no(value: Any) -> Any:
            raise ValueError("python said no")

        return tf.ensure_shape(tf.py_function(no, [x], tf.float32), x.shape)  # mark: failing

    said = ("python said no", "stage 'b'", "cluster 'b'", "as they were before")
    told(StageFailedError, lambda: fit(sub(failing)), *said, at=marked("failing"))


def noted(x: Any) -> Any:
    tf.summary.scalar("mean", tf.reduce_mean(x), step=7)
    return x


def drawn(x: Any) -> Any:
    tf.summary.histogram("rows", x, step=7)  # mark: histogram
    return x


def written(folder: Path) -> list[tuple[int, str, Any]]:
    """Step, tag and value of all summaries in a folder."""
    found = []
    for file in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [(event.step, each.tag, tf.make_ndarray(each.tensor)) for each in event.summary.value]
    return found


def trained(folder: Path, middle: Any, micro: int = 1, scoped: bool = True) -> list[tuple[int, str, Any]]:
    with tf.summary.create_file_writer(str(folder)).as_default():
        fit(sub(middle, micro, scoped))
        tf.summary.flush()
    return written(folder)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_scalar_is_written_once_and_of_the_whole_batch(tmp_path: Path, micro: int) -> None:
    uncut = trained(tmp_path / "uncut", noted, scoped=False)
    found = trained(tmp_path / "cut", noted, micro)
    assert len(nb.last_report().stages) == 2
    assert [(step, tag.split("/")[-1]) for step, tag, _ in found] == [(7, "mean")]
    np.testing.assert_allclose(found[0][2], uncut[0][2], rtol=1e-5)


def test_a_histogram_is_written_uncut(tmp_path: Path) -> None:
    uncut, found = trained(tmp_path / "uncut", drawn, scoped=False), trained(tmp_path / "cut", drawn)
    assert len(found) == len(uncut) == 1
    np.testing.assert_allclose(found[0][2], uncut[0][2], rtol=1e-5, atol=1e-6)


def test_a_histogram_of_rows_cannot_be_put_together_from_micro_batches(tmp_path: Path) -> None:
    said = ("a variable that the step writes", "micro_batch=1")
    told(BatchCoupledError, lambda: trained(tmp_path, drawn, micro=2), *said, at=marked("histogram"))


def test_steps_that_a_variable_counts(tmp_path: Path) -> None:
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
    assert [(number, float(value)) for number, _, value in written(tmp_path)] == [(0, 2.0), (1, 4.0)]


class Largest(keras.metrics.Metric):
    """The largest number of the last batch."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(tf.reduce_max(y_pred))  # mark: max

    def result(self) -> Any:
        return self.seen


def test_a_metric_of_ones_own_is_named_with_its_line() -> None:
    model = functional(micro=2, metrics=[Largest()])
    said = ("the value of metric 'largest'", "Max over the batch is neither a sum nor a mean")
    mend = "remove 'largest' from model.compile(metrics=[...])"
    told(BatchCoupledError, lambda: fit(model), *said, mend, at=marked("max"))
    told(BatchCoupledError, lambda: nb.plan(model, *batch()), *said, mend, at=marked("max"))


@pytest.mark.parametrize("weighted", [False, True])
def test_one_of_keras_is_named(weighted: bool) -> None:
    """A correlation along the batch."""
    option = "weighted_metrics" if weighted else "metrics"
    model = functional(micro=2, **{option: [keras.metrics.PearsonCorrelation(axis=0, name="pearson")]})
    told(BatchCoupledError, lambda: fit(model), "metric 'pearson'", "remove 'pearson' from")


def test_without_it_or_with_one_micro_batch_all_is_well() -> None:
    assert np.isfinite(fit(functional(micro=2, metrics=["mae"]))["mae"]).all()
    assert np.isfinite(fit(functional(micro=1, metrics=[Largest()]))["largest"]).all()


def test_other_writes_are_not_called_metrics() -> None:
    seen, weight = tf.Variable(0.0, trainable=False), tf.Variable(2.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
            seen.assign(tf.reduce_max(x * weight))
            return x + 1.0

    told(BatchCoupledError, lambda: step(tf.ones([4, 2])), "a variable that the step writes: ", "micro_batch=1")
