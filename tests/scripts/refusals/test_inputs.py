"""Arguments of a step: batches of unusual forms, and arguments that are no batches."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import batch, fit, functional, marked, sub, told, two
from whale_nebula.capture import errors
from whale_nebula.errors import CaptureError, NebulaWarning, PlanError, StageFailedError, UnsupportedError

layers = keras.layers


def doubled(micro: int = 1) -> Any:
    return two(lambda x: x * 2.0, micro=micro)


def loss_of(micro: int) -> Any:
    return two(lambda x: x * 2.0, tf.reduce_mean, micro)


def dataset(*tensors: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(tensors)


# ------------------------------------------------------------------------------------------- kinds of tensors


def ragged() -> Any:
    return tf.ragged.constant([[1, 2], [3]], tf.int32)


def sparse() -> Any:
    return tf.sparse.from_dense(np.eye(2, 4, dtype="float32"))


@pytest.mark.parametrize(("strange", "name"), [(ragged, "RaggedTensor"), (sparse, "SparseTensor")])
def test_ragged_and_sparse_batches_are_refused(strange: Any, name: str) -> None:
    told(UnsupportedError, lambda: doubled()(strange()), f"input 'x' is a {name}", ".to_tensor()", at="x")
    model = functional()
    told(UnsupportedError, lambda: model.fit(dataset(strange(), np.ones((2, 2))), verbose=0), name, at="x")


def spelled(lower_in: str) -> Any:
    @nb.function
    def step(words: Any) -> Any:
        with nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="a"):
                lengths = tf.strings.length(words)
            with nb.stage(cluster=lower_in):
                lowered = tf.strings.lower(words)  # mark: string
            with nb.stage(cluster="b"):
                return tf.strings.join([lowered, tf.strings.as_string(lengths)])

    return step(tf.constant(["A", "B", "CC"]))


def test_strings_may_be_given_and_worked_on() -> None:
    nb.init(links="1gbit,0ms")
    assert spelled("b").numpy().tolist() == [b"a1", b"b1", b"cc2"]


def test_strings_do_not_cross_and_the_plan_says_so() -> None:
    said = (
        "a tensor of type string would cross from stage 'a' to stage 'b'",
        "move StringLower into 'b'",
        "StringLookup",
    )
    told(PlanError, lambda: spelled("a"), *said, at=marked("string"))


# ------------------------------------------------------------------------------------------- numbers of rows


@pytest.mark.parametrize("micro", [1, 2])
def test_no_rows_at_all(micro: int, recwarn: pytest.WarningsRecorder) -> None:
    """As without scopes: the mean of nothing is not a number."""
    step = loss_of(micro)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert np.isnan(step(tf.zeros([0, 4])))
    said = [str(each.message) for each in caught if issubclass(each.category, NebulaWarning)]
    assert len(said) == micro - 1
    assert all("asks for 2 micro-batches, but the first batch has 0 rows" in text for text in said)


def test_keras_takes_a_batch_of_no_rows() -> None:
    losses = [model.fit(dataset(*batch(0)), verbose=0).history for model in (sub(), sub(scoped=False))]
    assert losses[0] == losses[1]


def test_uncut_it_fails_where_the_rows_meet() -> None:
    model = sub()
    said = ("Incompatible shapes", "stage 'b'", "as they were before the step")
    told(StageFailedError, lambda: model.fit(dataset(batch(8)[0], batch(6)[1]), verbose=0), *said, at=__file__)


def test_a_batch_that_is_shaped_unlike_the_first_is_named() -> None:
    def batches() -> Any:
        x, y = batch(8)
        yield x, y
        yield x[:, :3], y

    said = ("input 'x' is float32[8,3] in this batch", "in the first")
    error = told(StageFailedError, lambda: functional().fit(batches(), steps_per_epoch=2, verbose=0), *said)
    assert "phase" not in error.what


# ------------------------------------------------------------------------------------------- arguments


def test_nothing_to_cut_is_told() -> None:
    with pytest.warns(NebulaWarning, match="asks for 2 micro-batches, but the step has no batch"):
        assert float(doubled(2)(tf.constant(1.0))) == 3.0


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_a_variable_as_an_argument_is_the_variable_itself(make: Any) -> None:
    weight = make(np.full([3], 2.0, "float32"))

    @nb.function
    def step(x: Any, given: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="a"):
                hidden = x * tf.convert_to_tensor(given)
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(hidden)
        given.assign(given - tape.gradient(loss, given))
        return loss

    x = tf.ones([4, 3])
    assert float(step(x, weight)) == 2.0
    np.testing.assert_allclose(np.array(weight), 2.0 - 1.0 / 3.0, rtol=1e-6)
    assert float(step(x, weight)) < 2.0


def test_another_number_of_inputs_is_another_plan() -> None:
    step = two(tf.add_n)
    assert [float(step([tf.ones(1)] * count)[0]) for count in (1, 2, 1)] == [2.0, 3.0, 2.0]


def test_a_batch_of_another_shape_is_told_with_what_was_given() -> None:
    strange = np.ones((8, 5), "float32"), np.ones((8, 2), "float32")
    model = functional()
    said = ("expected shape=(None, 4), found shape=(None, 5)", "x float32[None, 5]")
    told(CaptureError, lambda: model.fit(*strange, verbose=0), *said, at=__file__)
    fit(model)  # from the second form on the sizes are free, as Keras frees them: it fails where it is multiplied
    before = model.get_weights()
    said = ("In[0]: [8,5], In[1]: [4,4]", "stage 'a'", "as they were before the step")
    told(StageFailedError, lambda: model.fit(*strange, verbose=0), *said, at="error_checks.py")
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strange", [{"a": np.ones((2, 4)), "b": np.ones((2, 4))}, (np.ones((2, 4)),) * 4])
def test_a_dataset_of_another_structure(strange: Any) -> None:
    model = sub()
    given = tf.data.Dataset.from_tensors(strange)
    error = told(CaptureError, lambda: model.fit(given, verbose=0), "the arguments of the step are x")
    assert isinstance(error, ValueError)


# ------------------------------------------------------------------------------------------- what a trace holds


def test_a_variable_that_is_made_in_every_step() -> None:
    @nb.function
    def step(x: Any) -> Any:
        weight = tf.Variable(1.0)  # mark: variable
        with nb.cluster(), nb.stage(cluster="a"):
            return x * weight

    told(CaptureError, lambda: step(tf.ones(2)), "creates a variable", "create it once", at=marked("variable"))


def test_a_variable_that_is_made_for_each_form_of_input() -> None:
    """As under tf.function: the first trace of each may make its own."""
    weights: dict[int, tf.Variable] = {}

    def first(x: Any) -> Any:
        if x.shape.rank not in weights:
            weights[x.shape.rank] = tf.Variable(2.0)
        return x * weights[x.shape.rank]

    step = two(first, tf.reduce_sum)
    assert [float(step(tf.ones([1] * rank))) for rank in (1, 2, 1)] == [2.0, 2.0, 2.0]
    assert len(weights) == 2


def test_a_constant_that_no_graph_can_hold() -> None:
    table = np.broadcast_to(np.float32(0.0), (1 << 15, 1 << 14))  # 2 GB, none of them in memory

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            return x + tf.constant(table)[0, 0]  # mark: table

    said = ("larger than 2 GB", "tf.Variable(array, trainable=False)", "whole=('table',)")
    told(CaptureError, lambda: step(tf.ones(2)), *said, at=marked("table"))


def test_constants_that_are_too_much_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "LIMIT", 1000)
    small, large = np.ones((10, 4), "float32"), np.ones((250, 1), "float32")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            few = x + tf.constant(small)[0, 0]
            return few + tf.constant(large)[0, 0]  # mark: large

    said = ("the constants of the step have", "tf.Variable(array, trainable=False)")
    told(CaptureError, lambda: step(tf.ones(2)), *said, at=marked("large"))
