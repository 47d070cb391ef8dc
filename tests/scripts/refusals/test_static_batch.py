"""Values unknown to a trace: a batch size that is a constant, and Python that needs the value of a tensor."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import ROWS, WIDTH, fit, line_of, marked, same_training, sub, told
from whale_nebula.errors import BatchCoupledError, CaptureError, DataDependentError, StageFailedError, StaticBatchError


def reshaped(x: Any) -> Any:
    return tf.reshape(x, [ROWS, -1])  # mark: reshape


def reshaped_by_keras(x: Any) -> Any:
    return keras.ops.reshape(x, (ROWS, WIDTH))  # mark: keras


def concatenated(x: Any) -> Any:
    return tf.concat([x, tf.zeros([ROWS, WIDTH])], 1)[:, :WIDTH]


def added(x: Any) -> Any:
    return x + tf.ones([ROWS, WIDTH])


@pytest.mark.parametrize(
    ("middle", "mend"),
    [
        (reshaped, f"tf.reshape(x, [-1, {WIDTH}])"),
        (reshaped_by_keras, f"tf.reshape(x, [-1, {WIDTH}])"),
        (concatenated, f"tf.zeros([tf.shape(x)[0], {WIDTH}])"),
        (added, f"tf.zeros([tf.shape(x)[0], {WIDTH}])"),
        (lambda x: tf.stack(tf.unstack(x, ROWS)), "tf.map_fn"),
        (lambda x: tf.concat(tf.split(x, [ROWS // 2, ROWS // 2]), 0), "axis=1"),
    ],
)
def test_micro_batches_find_a_constant_batch_size(middle: Any, mend: str) -> None:
    told(StaticBatchError, lambda: fit(sub(middle, micro=2)), str(ROWS), "baked in", mend, at=line_of(middle))


def test_a_constant_batch_size_that_fits_is_no_mistake() -> None:
    """One micro-batch of as many rows as it says: as in the original, nothing is wrong with it."""

    def all_of_them(x: Any) -> Any:
        return added(concatenated(reshaped_by_keras(x)))

    same_training(sub(all_of_them), sub(all_of_them, scoped=False))


def test_what_it_leaves_unknown_is_blamed_on_the_reshape() -> None:
    """The number of rows is None, so [8, -1] gives a last axis that is None, and the next layer cannot be built."""
    text = f"rows are reshaped to [{ROWS}, -1]"
    told(StaticBatchError, lambda: fit(sub(reshaped)), text, f"[-1, {WIDTH}]", at=marked("reshape"))


def test_a_last_batch_with_fewer_rows_names_the_reshape_whatever_failed_first() -> None:
    model = sub(reshaped_by_keras)
    mend = f"tf.reshape(x, [-1, {WIDTH}]) at {marked('keras')}, where the batch size {ROWS} is baked in"
    told(StageFailedError, lambda: fit(model, rows=ROWS + 3), "stage 'b'", "cluster 'b'", mend)


class Early(keras.Model):
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


def early(staged: bool, **options: Any) -> keras.Model:
    model = Early(staged, **options)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("staged", [False, True])
def test_inputs_that_are_reshaped_are_found_where_they_are(staged: bool) -> None:
    """They do not fit the labels, far behind."""
    place = marked("inside") if staged else marked("outside")
    said = (f"the batch size {ROWS} is baked in", f"tf.reshape(x, [-1, {WIDTH}])")
    told(StaticBatchError, lambda: fit(early(staged)), *said, at=place)


@pytest.mark.parametrize("staged", [False, True])
def test_what_was_allowed_all_the_same_says_why_it_cannot_run(staged: bool) -> None:
    place = marked("inside") if staged else marked("outside")
    said = (f"micro-batches of {ROWS // 2} rows", f"tf.reshape(x, [-1, {WIDTH}]) at {place}", "micro_batch=1")
    told(CaptureError, lambda: fit(early(staged, coupled="allow")), *said, at="compile_loss/mse")


def test_labels_that_are_reshaped_are_found_too() -> None:
    def loss(wanted: Any, given: Any) -> Any:
        return tf.reduce_mean((tf.reshape(wanted, [ROWS, 2]) - given) ** 2, -1)  # mark: labels

    told(StaticBatchError, lambda: fit(sub(micro=2, loss=loss)), "[-1, 2]", at=marked("labels"))


def test_a_variable_that_no_micro_batch_fits_says_so() -> None:
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
    told(CaptureError, lambda: fit(model), *said, at=marked("table"))


def test_a_reshape_that_merges_rows_couples_them() -> None:
    """[4, 8] of eight rows of four: -1 would not mend it."""
    merged = sub(lambda x: tf.reshape(tf.reshape(x, [ROWS // 2, 2 * WIDTH]), [-1, WIDTH]), micro=2)
    told(BatchCoupledError, lambda: fit(merged), "fixed shape", "micro_batch=1", at=__file__)


@pytest.mark.parametrize(
    ("middle", "mend"),
    [
        (lambda x: x * x.shape[0], "tf.shape(x)[0]"),
        (lambda x: x + tf.zeros(x.shape), "tf.shape(x)[0]"),
        (lambda x: tf.stack([x[row] for row in range(x.shape[0])]), "tf.shape(x)[0]"),
        (lambda x: tf.stack(tf.unstack(x)), "tf.map_fn"),
    ],
)
@pytest.mark.parametrize("micro", [1, 2])
def test_python_that_reads_the_number_of_rows(middle: Any, mend: str, micro: int) -> None:
    told(StaticBatchError, lambda: fit(sub(middle, micro)), "None", mend, at=line_of(middle))


def test_an_error_of_the_users_about_shapes_is_the_users() -> None:
    def picky(x: Any) -> Any:
        raise ValueError(f"I want no shape like {x.shape}")

    with pytest.raises(ValueError, match="I want no shape like") as caught:
        fit(sub(picky))
    assert type(caught.value) is ValueError


def branching(x: Any) -> Any:
    if tf.reduce_sum(x) > 0:
        return x
    return -x


def halving(x: Any) -> Any:
    while tf.reduce_max(x) > 1.0:
        x = x / 2.0
    return x


@pytest.mark.parametrize(
    ("middle", "mend"),
    [
        (branching, "tf.cond"),
        (halving, "tf.while_loop"),
        (lambda x: tf.stack([row + 1.0 for row in x]), "tf.map_fn"),
        (lambda x: x * float(tf.reduce_sum(x)), "tf.cast(t, tf.float32)"),
        (lambda x: sum(x for _ in range(tf.size(x))), "tf.range(n)"),
        (lambda x: x * x.numpy(), "remove .numpy()"),
        (lambda x: x * np.mean(x), "tf.reduce_mean"),
    ],
)
def test_a_value_that_is_not_there_yet(middle: Any, mend: str) -> None:
    error = told(DataDependentError, lambda: fit(sub(middle)), "value", mend, at=line_of(middle))
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
