"""Values unknown to a trace: a batch size that is a constant, and Python that needs the value of a tensor."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import (
    ROWS,
    WIDTH,
    assert_same_training,
    build_subclassed,
    check_error,
    find_marked_line,
    find_middle_line,
    fit,
)
from whale_nebula.errors import BatchCoupledError, CaptureError, DataDependentError, StageFailedError, StaticBatchError


def reshape_rows(x: Any) -> Any:
    return tf.reshape(x, [ROWS, -1])  # mark: reshape


def reshape_rows_by_keras(x: Any) -> Any:
    return keras.ops.reshape(x, (ROWS, WIDTH))  # mark: keras


def concatenate_constant(x: Any) -> Any:
    return tf.concat([x, tf.zeros([ROWS, WIDTH])], 1)[:, :WIDTH]


def add_constant(x: Any) -> Any:
    return x + tf.ones([ROWS, WIDTH])


@pytest.mark.parametrize(
    ("middle", "mend"),
    [
        (reshape_rows, f"tf.reshape(x, [-1, {WIDTH}])"),
        pytest.param(reshape_rows_by_keras, f"tf.reshape(x, [-1, {WIDTH}])", marks=pytest.mark.grid),
        pytest.param(concatenate_constant, f"tf.zeros([tf.shape(x)[0], {WIDTH}])", marks=pytest.mark.grid),
        (add_constant, f"tf.zeros([tf.shape(x)[0], {WIDTH}])"),
        (lambda x: tf.stack(tf.unstack(x, ROWS)), "tf.map_fn"),
        (lambda x: tf.concat(tf.split(x, [ROWS // 2, ROWS // 2]), 0), "axis=1"),
    ],
)
def test_constant_batch_size_with_micro_batches_is_reported(middle: Any, mend: str) -> None:
    check_error(
        StaticBatchError,
        lambda: fit(build_subclassed(middle, micro=2)),
        str(ROWS),
        "baked in",
        mend,
        at=find_middle_line(middle),
    )


def test_constant_batch_size_that_fits_is_accepted() -> None:
    """One micro-batch of as many rows as it says: as in the original, nothing is wrong with it."""

    def all_of_them(x: Any) -> Any:
        return add_constant(concatenate_constant(reshape_rows_by_keras(x)))

    assert_same_training(build_subclassed(all_of_them), build_subclassed(all_of_them, scoped=False))


def test_unknown_sizes_are_attributed_to_the_reshape() -> None:
    """The number of rows is None, so [8, -1] gives a last axis that is None, and the next layer cannot be built."""
    text = f"rows are reshaped to [{ROWS}, -1]"
    check_error(
        StaticBatchError,
        lambda: fit(build_subclassed(reshape_rows)),
        text,
        f"[-1, {WIDTH}]",
        at=find_marked_line("reshape"),
    )


def test_smaller_last_batch_reports_the_reshape() -> None:
    model = build_subclassed(reshape_rows_by_keras)
    mend = f"tf.reshape(x, [-1, {WIDTH}]) at {find_marked_line('keras')}, where the batch size {ROWS} is baked in"
    check_error(StageFailedError, lambda: fit(model, rows=ROWS + 3), "stage 'b'", "cluster 'b'", mend)


class EarlyReshape(keras.Model):
    """The inputs are reshaped, before the first stage or in it."""

    def __init__(self, staged: bool, **options: Any) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(WIDTH), keras.layers.Dense(2)
        self.staged, self.options = staged, options

    def call(self, x: Any) -> Any:
        if not self.staged:
            x = tf.reshape(x, [ROWS, WIDTH])  # mark: outside
        with nb.cluster(), nb.pipeline(2, **self.options):
            with nb.stage(cluster="a"):
                if self.staged:
                    x = tf.reshape(x, [ROWS, WIDTH])  # mark: inside
                hidden = self.first(x)
            with nb.stage(cluster="b"):
                return self.last(hidden)


def build_early_reshape(staged: bool, **options: Any) -> keras.Model:
    model = EarlyReshape(staged, **options)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("staged", [False, True])
def test_reshape_of_inputs_is_reported_with_its_line(staged: bool) -> None:
    """They do not fit the labels, far behind."""
    place = find_marked_line("inside") if staged else find_marked_line("outside")
    said = (f"the batch size {ROWS} is baked in", f"tf.reshape(x, [-1, {WIDTH}])")
    check_error(StaticBatchError, lambda: fit(build_early_reshape(staged)), *said, at=place)


@pytest.mark.parametrize("staged", [pytest.param(False, marks=pytest.mark.grid), True])
def test_allowed_reshape_of_inputs_reports_why_it_fails(staged: bool) -> None:
    place = find_marked_line("inside") if staged else find_marked_line("outside")
    said = (f"micro-batches of {ROWS // 2} rows", f"tf.reshape(x, [-1, {WIDTH}]) at {place}", "micro_batch=1")
    check_error(CaptureError, lambda: fit(build_early_reshape(staged, coupled="allow")), *said, at="compile_loss/mse")


def test_reshape_of_labels_is_reported() -> None:
    def loss(wanted: Any, given: Any) -> Any:
        return tf.reduce_mean((tf.reshape(wanted, [ROWS, 2]) - given) ** 2, -1)  # mark: labels

    check_error(
        StaticBatchError, lambda: fit(build_subclassed(micro=2, loss=loss)), "[-1, 2]", at=find_marked_line("labels")
    )


def test_variable_with_batch_size_rows_is_reported() -> None:
    """One number for each row of the batch: nothing is reshaped, and it was allowed."""
    table = tf.Variable(tf.ones([ROWS]))

    def scaled(x: Any) -> Any:
        return x * tf.reshape(table, [ROWS, 1])  # mark: table

    inputs = keras.Input((WIDTH,))
    with nb.cluster(), nb.pipeline(2, coupled="allow"):
        with nb.stage(cluster="a"):
            hidden = keras.layers.Dense(WIDTH)(inputs)
        with nb.stage(cluster="b"):
            outputs = keras.layers.Dense(2)(keras.layers.Lambda(scaled, output_shape=(WIDTH,))(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    said = (f"micro-batches of {ROWS // 2} rows", "Dimensions must be equal", "nb.pipeline(micro_batch=1)")
    check_error(CaptureError, lambda: fit(model), *said, at=find_marked_line("table"))


def test_reshape_that_merges_rows_couples_them() -> None:
    """[4, 8] of eight rows of four: -1 would not mend it."""
    merged = build_subclassed(lambda x: tf.reshape(tf.reshape(x, [ROWS // 2, 2 * WIDTH]), [-1, WIDTH]), micro=2)
    check_error(BatchCoupledError, lambda: fit(merged), "fixed shape", "micro_batch=1", at=__file__)


@pytest.mark.parametrize(
    ("middle", "mend"),
    [
        (lambda x: x * x.shape[0], "tf.shape(x)[0]"),
        (lambda x: x + tf.zeros(x.shape), "tf.shape(x)[0]"),
        (lambda x: tf.stack([x[row] for row in range(x.shape[0])]), "tf.shape(x)[0]"),
        (lambda x: tf.stack(tf.unstack(x)), "tf.map_fn"),
    ],
)
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_python_reading_the_row_count_is_refused(middle: Any, mend: str, micro: int) -> None:
    check_error(
        StaticBatchError, lambda: fit(build_subclassed(middle, micro)), "None", mend, at=find_middle_line(middle)
    )


def test_missing_sample_weights_are_not_taken_for_a_static_shape() -> None:
    def loss(y: Any, p: Any, weights: Any = None) -> Any:
        return tf.reduce_sum((y - p) * weights) / tf.cast(tf.shape(y)[0], tf.float32)  # mark: weights

    said = "the step cannot be traced", "None"
    check_error(CaptureError, lambda: fit(build_subclassed(loss=loss)), *said, at=find_marked_line("weights"))


def test_shape_error_of_the_user_is_unchanged() -> None:
    def picky(x: Any) -> Any:
        raise ValueError(f"I want no shape like {x.shape}")

    with pytest.raises(ValueError, match="I want no shape like") as caught:
        fit(build_subclassed(picky))
    assert type(caught.value) is ValueError


def branch_on_value(x: Any) -> Any:
    if tf.reduce_sum(x) > 0:
        return x
    return -x


def halve_while_large(x: Any) -> Any:
    while tf.reduce_max(x) > 1.0:
        x = x / 2.0
    return x


@pytest.mark.parametrize(
    ("middle", "mend"),
    [
        (branch_on_value, "tf.cond"),
        (halve_while_large, "tf.while_loop"),
        (lambda x: tf.stack([row + 1.0 for row in x]), "tf.map_fn"),
        (lambda x: x * float(tf.reduce_sum(x)), "tf.cast(t, tf.float32)"),
        (lambda x: sum(x for _ in range(tf.size(x))), "tf.range(n)"),
        (lambda x: x * x.numpy(), "remove .numpy()"),
        (lambda x: x * np.mean(x), "tf.reduce_mean"),
    ],
)
def test_python_reading_a_tensor_value_is_refused(middle: Any, mend: str) -> None:
    error = check_error(
        DataDependentError, lambda: fit(build_subclassed(middle)), "value", mend, at=find_middle_line(middle)
    )
    assert len(str(error).splitlines()) == 3, "TensorFlow's advice for other cases is left out"


def test_nb_function_converts_python_control_flow() -> None:
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


def test_suggested_reshape_works() -> None:
    def mended(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x) * tf.reduce_mean(x)

    assert_same_training(build_subclassed(mended), build_subclassed(mended, scoped=False))


def test_numpy_under_nb_function_is_reported_at_its_line() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return x * np.mean(x)  # mark: rewritten

    check_error(DataDependentError, lambda: step(tf.ones([2])), "tf.reduce_mean", at=find_marked_line("rewritten"))


def test_tensorflow_error_becomes_a_capture_error_and_value_error() -> None:
    def mistaken(x: Any) -> Any:
        return tf.matmul(x, tf.ones([3, 3]))  # mark: matmul

    error = check_error(
        CaptureError, lambda: fit(build_subclassed(mistaken)), "Dimensions must be equal", at=find_marked_line("matmul")
    )
    assert isinstance(error, ValueError)
    assert "x float32[None, 4]" in error.why


def test_user_exception_is_raised_unchanged() -> None:
    class Mine(Exception):
        pass

    def raising(x: Any) -> Any:
        raise Mine("no")

    with pytest.raises(Mine, match="no") as caught:
        fit(build_subclassed(raising))
    assert any("while the step was captured" in note for note in caught.value.__notes__)
