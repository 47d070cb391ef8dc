"""Arguments of a step: batches of unusual forms, and arguments that are no batches."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import (
    build_functional,
    build_subclassed,
    check_error,
    find_marked_line,
    fit,
    make_batch,
    make_two_stage_step,
)
from whale_nebula.capture import errors
from whale_nebula.errors import CaptureError, NebulaWarning, PlanError, StageFailedError, UnsupportedError
from whale_nebula.ir.cut import Worker
from whale_nebula.passes.pipeline import cut_program

layers = keras.layers


def make_doubling_step(micro: int = 1) -> Any:
    return make_two_stage_step(lambda x: x * 2.0, micro=micro)


def evaluate_loss(micro: int) -> Any:
    return make_two_stage_step(lambda x: x * 2.0, tf.reduce_mean, micro)


def dataset(*tensors: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(tensors)


# ------------------------------------------------------------------------------------------- kinds of tensors


def ragged() -> Any:
    return tf.ragged.constant([[1, 2], [3]], tf.int32)


def sparse() -> Any:
    return tf.sparse.from_dense(np.eye(2, 4, dtype="float32"))


@pytest.mark.parametrize(("unsupported", "name"), [(ragged, "RaggedTensor"), (sparse, "SparseTensor")])
def test_ragged_and_sparse_batches_are_refused(unsupported: Any, name: str) -> None:
    check_error(
        UnsupportedError, lambda: make_doubling_step()(unsupported()), f"input 'x' is a {name}", ".to_tensor()", at="x"
    )
    model = build_functional()
    check_error(UnsupportedError, lambda: model.fit(dataset(unsupported(), np.ones((2, 2))), verbose=0), name, at="x")


def make_string_step(lower_in: str) -> Any:
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


def test_strings_are_accepted_within_a_stage() -> None:
    nb.init(links="1gbit,0ms")
    assert make_string_step("b").numpy().tolist() == [b"a1", b"b1", b"cc2"]


def test_strings_between_stages_are_refused() -> None:
    said = (
        "a tensor of type string would cross from stage 'a' to stage 'b'",
        "move StringLower into 'b'",
        "StringLookup",
    )
    check_error(PlanError, lambda: make_string_step("a"), *said, at=find_marked_line("string"))


def test_tensor_of_many_axes_between_stages_is_refused() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            x = tf.reshape(x, [-1, *[1] * 8])
        with nb.stage(cluster="b"):
            return tf.reduce_sum(tf.square(x))

    check_error(PlanError, lambda: step(tf.ones([4])), "a tensor of rank 9 would cross", "tf.reshape it in 'a'")


@pytest.mark.parametrize(
    "compute, said",
    [
        (tf.strings.as_string, ("type string", "return numbers (ids), or set results: owner", "AsString")),
        (
            lambda x: tf.reshape(x, [-1, *[1] * 8]),
            ("rank 9", "tf.reshape it to 8 axes, or set results: owner", "Reshape"),
        ),
    ],
    ids=["string", "nine axes"],
)
def test_result_that_cannot_be_sent_is_refused_across_processes(compute: Any, said: tuple[str, str, str]) -> None:
    """It would be sent to all processes; with `results: owner` it stays."""

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            result = compute(x)
        with nb.stage(cluster="b"):
            return result, x + 1

    assert step(tf.ones([2]))[0].numpy().tolist() == compute(tf.ones([2])).numpy().tolist()
    program = step._step.last.captured.program
    workers = [Worker(f"{name}/0", name, (number,)) for number, name in enumerate("ab")]
    what = f"a result of {said[0]} would be sent from worker 'a/0' to the other processes"
    check_error(PlanError, lambda: cut_program(program, workers), what, said[1], at=said[2])
    assert cut_program(program, workers, results="owner")


# ------------------------------------------------------------------------------------------- numbers of rows


@pytest.mark.parametrize("micro", [1, 2])
def test_empty_batch_gives_the_uncut_loss(micro: int, recwarn: pytest.WarningsRecorder) -> None:
    """As without scopes: the mean of nothing is not a number."""
    step = evaluate_loss(micro)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert np.isnan(step(tf.zeros([0, 4])))
    said = [str(each.message) for each in caught if issubclass(each.category, NebulaWarning)]
    assert len(said) == micro - 1
    assert all("asks for 2 micro-batches, but the first batch has 0 rows" in text for text in said)


def test_keras_accepts_an_empty_batch() -> None:
    losses = [
        model.fit(dataset(*make_batch(0)), verbose=0).history
        for model in (build_subclassed(), build_subclassed(scoped=False))
    ]
    assert losses[0] == losses[1]


def test_different_row_counts_fail_in_the_loss() -> None:
    model = build_subclassed()
    said = ("Incompatible shapes", "stage 'b'", "as they were before the step")
    check_error(
        StageFailedError, lambda: model.fit(dataset(make_batch(8)[0], make_batch(6)[1]), verbose=0), *said, at=__file__
    )


def test_batch_of_another_width_is_reported() -> None:
    def batches() -> Any:
        x, y = make_batch(8)
        yield x, y
        yield x[:, :3], y

    said = ("input 'x' is float32[8,3] in this batch", "in the first")
    error = check_error(
        StageFailedError, lambda: build_functional().fit(batches(), steps_per_epoch=2, verbose=0), *said
    )
    assert "phase" not in error.what


# ------------------------------------------------------------------------------------------- arguments


def test_step_without_a_batch_warns() -> None:
    with pytest.warns(NebulaWarning, match="asks for 2 micro-batches, but the step has no batch"):
        assert float(make_doubling_step(2)(tf.constant(1.0))) == 3.0


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_variable_argument_is_passed_unchanged(make: Any) -> None:
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


def test_another_number_of_inputs_makes_another_plan() -> None:
    step = make_two_stage_step(tf.add_n)
    assert [float(step([tf.ones(1)] * count)[0]) for count in (1, 2, 1)] == [2.0, 3.0, 2.0]


def test_batch_of_another_shape_is_reported_with_its_arguments() -> None:
    unsupported = np.ones((8, 5), "float32"), np.ones((8, 2), "float32")
    model = build_functional()
    said = ("expected shape=(None, 4), found shape=(None, 5)", "x float32[None, 5]")
    check_error(CaptureError, lambda: model.fit(*unsupported, verbose=0), *said, at=__file__)
    fit(model)  # from the second form on the sizes are free, as Keras frees them: it fails where it is multiplied
    before = model.get_weights()
    said = ("In[0]: [8,5], In[1]: [4,4]", "stage 'a'", "as they were before the step")
    check_error(StageFailedError, lambda: model.fit(*unsupported, verbose=0), *said, at="error_checks.py")
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("unsupported", [{"a": np.ones((2, 4)), "b": np.ones((2, 4))}, (np.ones((2, 4)),) * 4])
def test_dataset_of_another_structure_is_refused(unsupported: Any) -> None:
    model = build_subclassed()
    given = tf.data.Dataset.from_tensors(unsupported)
    error = check_error(CaptureError, lambda: model.fit(given, verbose=0), "the arguments of the step are x")
    assert isinstance(error, ValueError)


# ------------------------------------------------------------------------------------------- what a trace holds


def test_variable_created_in_every_step_is_refused() -> None:
    @nb.function
    def step(x: Any) -> Any:
        weight = tf.Variable(1.0)  # mark: variable
        with nb.cluster(), nb.stage(cluster="a"):
            return x * weight

    check_error(
        CaptureError, lambda: step(tf.ones(2)), "creates a variable", "create it once", at=find_marked_line("variable")
    )


def test_variable_created_for_each_signature_is_allowed() -> None:
    """As under tf.function: the first trace of each may make its own."""
    weights: dict[int, tf.Variable] = {}

    def first(x: Any) -> Any:
        if x.shape.rank not in weights:
            weights[x.shape.rank] = tf.Variable(2.0)
        return x * weights[x.shape.rank]

    step = make_two_stage_step(first, tf.reduce_sum)
    assert [float(step(tf.ones([1] * rank))) for rank in (1, 2, 1)] == [2.0, 2.0, 2.0]
    assert len(weights) == 2


def test_constant_above_two_gigabytes_is_refused() -> None:
    table = np.broadcast_to(np.float32(0.0), (1 << 15, 1 << 14))  # 2 GB, none of them in memory

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            return x + tf.constant(table)[0, 0]  # mark: table

    said = ("larger than 2 GB", "tf.Variable(array, trainable=False)", "whole=('table',)")
    check_error(CaptureError, lambda: step(tf.ones(2)), *said, at=find_marked_line("table"))


def test_constants_too_large_in_total_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "CONSTANT_LIMIT", 1000)
    small, large = np.ones((10, 4), "float32"), np.ones((250, 1), "float32")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            few = x + tf.constant(small)[0, 0]
            return few + tf.constant(large)[0, 0]  # mark: large

    said = ("the constants of the step have", "tf.Variable(array, trainable=False)")
    check_error(CaptureError, lambda: step(tf.ones(2)), *said, at=find_marked_line("large"))
