"""Scopes around a step hold for the calls inside them only."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.step import signature
from whale_nebula.errors import AbsentInputError, LinkClosedError
from whale_nebula.runtime.keras import _name_arguments
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step.results import Later
from whale_nebula.runtime.step.step import Step, takes, widen_signature
from whale_nebula.spec import Spec

X = np.ones((8, 4), "float32")
Y = X[:, :1]


def model(scoped: bool = True, placed: bool = False) -> keras.Model:
    inputs = keras.Input((4,))
    with nb.stage(cluster="a") if scoped else contextlib.nullcontext():
        hidden = keras.layers.Dense(4, name="encoder")(inputs)
    with nb.stage(cluster="b") if scoped else contextlib.nullcontext():
        outputs = keras.layers.Dense(1, name="decoder")(hidden)
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    if placed:
        nb.place(made, {"encoder": "a", "decoder": "b"})
    return made


def fit(trained: Any) -> None:
    trained.fit(X, Y, batch_size=8, verbose=0, shuffle=False)


def planned() -> tuple[int, dict[str, str], int]:
    """Of the last step: its micro-batches and its codecs; and how many plans the run has made."""
    report = nb.last_report()
    return report.micro_batches, {name: each.codec for name, each in report.boundaries.items()}, current_run().programs


@pytest.mark.grid
def test_each_fit_is_planned_for_the_scopes_that_it_stands_in() -> None:
    trained, coded = model(), {"b0 a->b": "fp16", "b0 b->a": "int8"}
    fit(trained)
    assert planned() == (1, {}, 1)
    with nb.pipeline(4):
        fit(trained)
    assert planned() == (4, {}, 2)
    for _ in range(2):  # the same words are the same plan, wherever they stand
        with nb.compress(fp16=True):
            fit(trained)
        assert planned() == (1, coded, 3)
    with nb.cluster(), nb.replica(2), nb.compress(fp16=True):
        fit(trained)
    assert planned() == (2, coded, 4)
    fit(trained)
    assert planned() == (1, {}, 4) and nb.last_report().step == 6


@pytest.mark.grid
def test_evaluate_predict_and_functions_are_too() -> None:
    trained = model()
    trained.evaluate(X, Y, verbose=0)
    trained.predict(X, verbose=0)
    with nb.pipeline(2):
        trained.evaluate(X, Y, verbose=0)
        assert planned()[0] == 2
        trained.predict(X, verbose=0)
        assert planned()[0] == 2

    @nb.function
    def called(rows: Any) -> Any:
        return trained(rows)

    called(X)
    assert planned()[0] == 1
    with nb.pipeline(4):
        called(X)
    assert planned()[0] == 4


def test_a_model_without_scopes_has_those_around_it_and_loses_them_again() -> None:
    trained = model(scoped=False)
    fit(trained)
    with pytest.raises(nb.errors.StateError):
        nb.last_report()
    with warnings.catch_warnings():
        warnings.simplefilter("error", nb.errors.NebulaWarning)
        with nb.replica(2):
            fit(trained)
    assert planned()[0] == 2
    inside = trained.train_function
    fit(trained)
    assert trained.train_function is not inside
    assert planned() == (2, {}, 1)  # of the step before: Keras has run this one


def test_a_pipeline_around_a_model_without_stages_says_that_it_holds_none() -> None:
    with pytest.warns(nb.errors.NebulaWarning, match=r"nb\.pipeline contains no nb\.stage"), nb.pipeline(2):
        fit(model(scoped=False))


@pytest.mark.parametrize(
    ("placed", "what"), [pytest.param(False, "nb.stage", marks=pytest.mark.grid), (True, "nb.place")]
)
def test_a_layout_around_a_step_that_leaves_out_a_stage_is_refused(placed: bool, what: str) -> None:
    trained = model(scoped=not placed, placed=placed)
    said = rf"{what} at .* is on cluster 'a', which nb\.cluster at"
    with pytest.raises(nb.errors.StageIdentityError, match=said), nb.cluster(["z"]):
        fit(trained)
    with nb.cluster(["b", "a"]):
        fit(trained)
    assert list(nb.last_report().stages) == ["a", "b"]


def test_a_place_for_what_is_inside_a_layer_without_layers_is_refused_when_it_is_called() -> None:
    layer = keras.layers.Dense(4, name="alone")
    nb.place(layer, {"alone": "a"})
    trained = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    trained.compile("sgd", "mse")
    with pytest.raises(nb.errors.PlacementError, match="no layer of 'alone' matches 'alone'"):
        fit(trained)
    nb.place(layer, {})


def test_lists_are_told_from_arrays_in_a_sentence() -> None:
    with pytest.raises(nb.errors.CaptureError) as caught:
        nb.verify(model(), X.tolist(), Y)
    assert "x/0/3 float32[]" in caught.value.why and caught.value.why.endswith(" and 21 more")
    assert caught.value.mend.startswith("pass arrays, np.asarray(x)")


def test_a_report_and_a_plan_say_which_stages_there_are() -> None:
    trained = model()
    fit(trained)
    for stages in (nb.last_report().stages, nb.plan(trained, X, Y).stages):
        with pytest.raises(KeyError, match="'zz' does not exist: choose one of 'a', 'b'"):
            stages["zz"]


def test_a_tolerance_that_is_not_used_is_not_told() -> None:
    trained = model()
    with nb.compress(fp16=True):
        assert not any("tolerance" in note for note in nb.verify(trained, X, Y).notes)
    with nb.compress(fp16=True, backward=None):
        assert any("tolerance" in note for note in nb.verify(trained, X, Y).notes)


@pytest.mark.grid
def test_a_compress_scope_without_a_say_does_not_make_steps_incomparable() -> None:
    trained = model()
    with nb.pipeline(2, coupled="allow"), nb.compress(fp16=True, backward=None), nb.compress(bf16=True, backward=None):
        found = nb.verify(trained, X, Y)
    assert found.comparable, found


# -------------------- Batches of many lengths run by one program, if the step does not depend on sizes
def _form(*shape: int, dtype: str = "float32", **plain: Any) -> Any:
    return signature([("x", np.zeros(shape, dtype)), *plain.items()])[0]


def test_axes_that_differ_are_free_and_others_stay() -> None:
    wide = widen_signature(_form(2, 5, 3), [_form(4, 7, 3)])
    assert wide is not None
    assert wide.specs == (tf.TensorSpec([None, None, 3], tf.float32),)
    assert takes(wide, _form(8, 9, 3))
    assert not takes(wide, _form(8, 9, 4))


@pytest.mark.parametrize("other", [_form(4, 7, dtype="int32"), _form(4, 7, 3), _form(4, 7, flag=True)])
def test_forms_that_differ_in_more_than_sizes_are_not_widened(other: Any) -> None:
    assert widen_signature(_form(4, 5), [other]) is None
    assert not takes(other, _form(4, 5))


def _ran(fn: Callable[[Any], Any], *, widens: bool) -> tuple[Step, list[np.ndarray]]:
    step = Step(fn, name="step", widens=widens)
    lengths = (3, 5, 4, 6, 5)
    return step, [np.array(step.run([("x", tf.ones((4, n)) * n)])) for n in lengths]


def _sums(x: Any) -> Any:
    with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
        hidden = tf.cumsum(x, axis=1)
    with nb.stage(cluster="b"):
        return tf.reduce_sum(hidden, axis=1)


def _counted(x: Any) -> Any:
    """Needs to know how long its rows are while it is traced."""
    with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
        hidden = tf.add_n([x[:, n] * (n + 1) for n in range(x.shape[1])])
    with nb.stage(cluster="b"):
        return hidden * 2.0


@pytest.mark.parametrize(("fn", "widens", "programs"), [(_sums, True, 2), (_sums, False, 4), (_counted, True, 4)])
def test_many_lengths(fn: Callable[[Any], Any], widens: bool, programs: int) -> None:
    """A step is captured for its first length and then once more, or for each length if it must be."""
    step, found = _ran(fn, widens=widens)
    assert len(step.forms) == programs
    rows = {_sums: lambda n: n * n * (n + 1) / 2, _counted: lambda n: n * n * (n + 1)}[fn]
    np.testing.assert_allclose(np.stack(found), [[rows(n)] * 4 for n in (3, 5, 4, 6, 5)])


# -------------------- Lazy numbers: what is known without their value, what waits for it, and the effect of a fa
@pytest.fixture
def promise() -> Future[Any]:
    return Future()


@pytest.fixture
def loss(promise: Future[Any]) -> Later:
    return Later(promise, 0, Spec("float32", ()))


def test_its_kind_is_known_before_it_comes(loss: Later) -> None:
    assert (loss.dtype, loss.shape.rank) == (tf.float32, 0)
    assert len({loss, loss}) == 1


READS = {
    "float": float,
    "numpy": lambda loss: loss.numpy(),
    "array": np.asarray,
    "format": lambda loss: f"{loss:.1f}",
    "sum": lambda loss: loss + 1.0,
    "sum from the left": lambda loss: 1.0 + loss,
    "comparison": lambda loss: loss < 3.0,
    "op": tf.sqrt,
    "cast": lambda loss: tf.convert_to_tensor(loss, tf.float64),
    "metric": lambda loss: keras.metrics.Mean()(loss),
    "repr": repr,
    "text": str,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_it_reads_as_the_tensor_does(promise: Future[Any], loss: Later, read: Any) -> None:
    tensor = tf.constant(2.25)
    promise.set_result([tensor])
    cast = tf.cast(tensor, tf.float64) if read is READS["cast"] else read(tensor)
    assert np.all(np.asarray(read(loss)) == np.asarray(cast))


@pytest.mark.parametrize("read", [READS["float"], READS["op"], READS["repr"], READS["numpy"], READS["array"]])
def test_what_kept_it_from_coming_is_raised_where_it_is_read(promise: Future[Any], loss: Later, read: Any) -> None:
    promise.set_exception(LinkClosedError("worker 'npu/0' is gone"))
    with pytest.raises(LinkClosedError, match="'npu/0' is gone"):
        read(loss)


# -------------------- The structure of a Keras batch, if the config's `inputs` names parts that are None
FORM = {"shape": [None, 2]}
BATCH_X, BATCH_Y, W = tf.zeros([4, 2]), tf.ones([4, 2]), tf.ones([4])


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[None]:
    with nb.init({"inputs": dict.fromkeys(request.param, FORM)}):
        yield


CASES: list[tuple[list[str], str, Any, list[str]]] = [
    ([], "train", BATCH_X, ["x"]),
    ([], "train", (BATCH_X, BATCH_Y), ["x", "y"]),
    ([], "train", (BATCH_X, None, W), ["x", "sample_weight"]),
    (["y"], "train", BATCH_X, ["x", "y"]),
    (["y"], "test", (BATCH_X,), ["x", "y"]),
    (["y"], "predict", BATCH_X, ["x"]),
    (["y/a", "y/b"], "train", BATCH_X, ["x", "y"]),
    (["y"], "train", (BATCH_X, None), ["x", "y"]),
    (["x"], "train", (None, BATCH_Y), ["x", "y"]),
    (["sample_weight"], "train", (BATCH_X, BATCH_Y), ["x", "y", "sample_weight"]),
    (["y"], "train", (BATCH_X, None, W), ["x", "y", "sample_weight"]),
    (["yonder"], "train", BATCH_X, ["x"]),
]


@pytest.mark.parametrize(("run", "kind", "data", "names"), CASES, indirect=["run"])
@pytest.mark.usefixtures("run")
def test_parts_that_the_config_names_are_there(kind: str, data: Any, names: list[str]) -> None:
    arguments, unpack = _name_arguments(data, kind)
    assert [name for name, _ in arguments] == names
    (given,), _ = unpack([name.upper() for name in names])
    parts = given if isinstance(given, tuple) else (given,)
    assert [part for part in parts if part is not None] == [name.upper() for name in names]


@pytest.mark.parametrize("run", [["y"]], indirect=True)
@pytest.mark.usefixtures("run")
def test_an_optional_that_is_empty_is_a_none() -> None:
    arguments, _ = _name_arguments((BATCH_X, tf.experimental.Optional.empty(None)), "train")
    assert arguments[1] == ("y", None)


@pytest.mark.parametrize("run", [["x/b", "y"]], indirect=True)
@pytest.mark.usefixtures("run")
def test_in_one_process_all_of_a_batch_is_given() -> None:
    inputs = {name: keras.Input((2,), name=name) for name in ("a", "b")}
    with nb.cluster(), nb.stage(cluster="gpu"):
        outputs = keras.layers.Dense(2)(inputs["a"] + inputs["b"])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    array = np.ones((4, 2), "float32")
    with pytest.raises(AbsentInputError, match="input 'x/b' is None, and all clusters are in this process"):
        model.fit({"a": array, "b": None}, array, verbose=0)
    with pytest.raises(AbsentInputError, match="input 'y' is None"):
        model.fit({"a": array, "b": array}, verbose=0)
    assert model.predict({"a": array, "b": array}, verbose=0).shape == (4, 2)
    assert np.isfinite(model.fit({"a": array, "b": array}, array, verbose=0).history["loss"][0])
