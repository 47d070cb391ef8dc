"""Scopes around a step hold for the calls inside them only."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from whale_nebula.runtime.step.actors import _join
from whale_nebula.runtime.step.results import PendingResult
from whale_nebula.runtime.step.step import Step, accepts_call, widen_signature
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


def describe_last_step() -> tuple[int, dict[str, str], int]:
    """Of the last step: its micro-batches and its codecs; and how many plans the run has made."""
    report = nb.last_report()
    return report.micro_batches, {name: each.codec for name, each in report.boundaries.items()}, current_run().programs


@pytest.mark.grid
def test_fit_is_planned_for_the_scopes_around_it() -> None:
    trained, coded = model(), {"b0 a->b": "fp16", "b0 b->a": "int8"}
    fit(trained)
    assert describe_last_step() == (1, {}, 1)
    with nb.pipeline(4):
        fit(trained)
    assert describe_last_step() == (4, {}, 2)
    for _ in range(2):  # the same words are the same plan, wherever they stand
        with nb.compress(fp16=True):
            fit(trained)
        assert describe_last_step() == (1, coded, 3)
    with nb.cluster(), nb.replica(2), nb.compress(fp16=True):
        fit(trained)
    assert describe_last_step() == (2, coded, 4)
    fit(trained)
    assert describe_last_step() == (1, {}, 4) and nb.last_report().step == 6


@pytest.mark.grid
def test_evaluate_predict_and_functions_are_planned_for_their_scopes() -> None:
    trained = model()
    trained.evaluate(X, Y, verbose=0)
    trained.predict(X, verbose=0)
    with nb.pipeline(2):
        trained.evaluate(X, Y, verbose=0)
        assert describe_last_step()[0] == 2
        trained.predict(X, verbose=0)
        assert describe_last_step()[0] == 2

    @nb.function
    def called(rows: Any) -> Any:
        return trained(rows)

    called(X)
    assert describe_last_step()[0] == 1
    with nb.pipeline(4):
        called(X)
    assert describe_last_step()[0] == 4


def test_model_without_scopes_uses_those_around_each_fit() -> None:
    trained = model(scoped=False)
    fit(trained)
    with pytest.raises(nb.errors.StateError):
        nb.last_report()
    with warnings.catch_warnings():
        warnings.simplefilter("error", nb.errors.NebulaWarning)
        with nb.replica(2):
            fit(trained)
    assert describe_last_step()[0] == 2
    inside = trained.train_function
    fit(trained)
    assert trained.train_function is not inside
    assert describe_last_step() == (2, {}, 1)  # of the step before: Keras has run this one


def test_pipeline_around_a_model_without_stages_warns() -> None:
    with pytest.warns(nb.errors.NebulaWarning, match=r"nb\.pipeline contains no nb\.stage"), nb.pipeline(2):
        fit(model(scoped=False))


@pytest.mark.parametrize(
    ("placed", "what"), [pytest.param(False, "nb.stage", marks=pytest.mark.grid), (True, "nb.place")]
)
def test_cluster_scope_without_the_cluster_of_a_stage_is_refused(placed: bool, what: str) -> None:
    trained = model(scoped=not placed, placed=placed)
    message = rf"{what} at .* is on cluster 'a', which nb\.cluster at"
    with pytest.raises(nb.errors.StageIdentityError, match=message), nb.cluster(["z"]):
        fit(trained)
    with nb.cluster(["b", "a"]):
        fit(trained)
    assert list(nb.last_report().stages) == ["a", "b"]


def test_place_on_a_layer_without_sublayers_is_refused_by_fit() -> None:
    layer = keras.layers.Dense(4, name="alone")
    nb.place(layer, {"alone": "a"})
    trained = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    trained.compile("sgd", "mse")
    with pytest.raises(nb.errors.PlacementError, match="no layer of 'alone' matches 'alone'"):
        fit(trained)
    nb.place(layer, {})


def test_lists_instead_of_arrays_are_refused_with_a_fix() -> None:
    with pytest.raises(nb.errors.CaptureError) as caught:
        nb.verify(model(), X.tolist(), Y)
    assert "x/0/3 float32[]" in caught.value.why and caught.value.why.endswith(" and 21 more")
    assert caught.value.mend.startswith("pass arrays, np.asarray(x)")


def test_unknown_stage_name_is_refused_with_the_known_names() -> None:
    trained = model()
    fit(trained)
    for stages in (nb.last_report().stages, nb.plan(trained, X, Y).stages):
        with pytest.raises(KeyError, match="'zz' does not exist: choose one of 'a', 'b'"):
            stages["zz"]


def test_verify_notes_the_tolerance_only_when_it_is_used() -> None:
    trained = model()
    with nb.compress(fp16=True):
        assert not any("tolerance" in note for note in nb.verify(trained, X, Y).notes)
    with nb.compress(fp16=True, backward=None):
        assert any("tolerance" in note for note in nb.verify(trained, X, Y).notes)


@pytest.mark.grid
def test_overridden_compress_scope_keeps_steps_comparable() -> None:
    trained = model()
    with nb.pipeline(2, coupled="allow"), nb.compress(fp16=True, backward=None), nb.compress(bf16=True, backward=None):
        found = nb.verify(trained, X, Y)
    assert found.comparable, found


# -------------------- Batches of many lengths run by one program, if the step does not depend on sizes
def make_signature(*shape: int, dtype: str = "float32", **plain: Any) -> Any:
    return signature([("x", np.zeros(shape, dtype)), *plain.items()])[0]


def test_widened_signature_frees_only_the_axes_that_differ() -> None:
    wide = widen_signature(make_signature(2, 5, 3), [make_signature(4, 7, 3)])
    assert wide is not None
    assert wide.specs == (tf.TensorSpec([None, None, 3], tf.float32),)
    assert accepts_call(wide, make_signature(8, 9, 3))
    assert not accepts_call(wide, make_signature(8, 9, 4))


@pytest.mark.parametrize(
    "other", [make_signature(4, 7, dtype="int32"), make_signature(4, 7, 3), make_signature(4, 7, flag=True)]
)
def test_signatures_of_other_dtype_rank_or_values_are_not_widened(other: Any) -> None:
    assert widen_signature(make_signature(4, 5), [other]) is None
    assert not accepts_call(other, make_signature(4, 5))


def run_lengths(fn: Callable[[Any], Any], *, widens: bool) -> tuple[Step, list[np.ndarray]]:
    step = Step(fn, name="step", widens=widens)
    lengths = (3, 5, 4, 6, 5)
    return step, [np.array(step.run([("x", tf.ones((4, n)) * n)])) for n in lengths]


def compute_sums(x: Any) -> Any:
    with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
        hidden = tf.cumsum(x, axis=1)
    with nb.stage(cluster="b"):
        return tf.reduce_sum(hidden, axis=1)


def compute_sums_of_known_length(x: Any) -> Any:
    """Needs to know how long its rows are while it is traced."""
    with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
        hidden = tf.add_n([x[:, n] * (n + 1) for n in range(x.shape[1])])
    with nb.stage(cluster="b"):
        return hidden * 2.0


@pytest.mark.parametrize(
    ("fn", "widens", "programs"),
    [(compute_sums, True, 2), (compute_sums, False, 4), (compute_sums_of_known_length, True, 4)],
)
def test_number_of_programs_for_batches_of_many_lengths(fn: Callable[[Any], Any], widens: bool, programs: int) -> None:
    """A step is captured for its first length and then once more, or for each length if it must be."""
    step, found = run_lengths(fn, widens=widens)
    assert len(step.forms) == programs
    rows = {compute_sums: lambda n: n * n * (n + 1) / 2, compute_sums_of_known_length: lambda n: n * n * (n + 1)}[fn]
    np.testing.assert_allclose(np.stack(found), [[rows(n)] * 4 for n in (3, 5, 4, 6, 5)])


# -------------------- Lazy numbers: what is known without their value, what waits for it, and the effect of a fa
@pytest.fixture
def promise() -> Future[Any]:
    return Future()


@pytest.fixture
def loss(promise: Future[Any]) -> PendingResult:
    return PendingResult(promise, 0, Spec("float32", ()))


def test_pending_result_has_its_dtype_and_shape(loss: PendingResult) -> None:
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
    "copy": copy.copy,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_pending_result_reads_like_the_tensor(promise: Future[Any], loss: PendingResult, read: Any) -> None:
    tensor = tf.constant(2.25)
    promise.set_result([tensor])
    cast = tf.cast(tensor, tf.float64) if read is READS["cast"] else read(tensor)
    assert np.all(np.asarray(read(loss)) == np.asarray(cast))


@pytest.mark.parametrize("read", [READS["float"], READS["op"], READS["repr"], READS["numpy"], READS["array"]])
def test_failure_of_a_pending_result_is_raised_when_it_is_read(
    promise: Future[Any], loss: PendingResult, read: Any
) -> None:
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
def test_configured_inputs_are_added_to_a_keras_batch(kind: str, data: Any, names: list[str]) -> None:
    arguments, unpack = _name_arguments(data, kind)
    assert [name for name, _ in arguments] == names
    (given,), _ = unpack([name.upper() for name in names])
    parts = given if isinstance(given, tuple) else (given,)
    assert [part for part in parts if part is not None] == [name.upper() for name in names]


@pytest.mark.parametrize("run", [["y"]], indirect=True)
@pytest.mark.usefixtures("run")
def test_empty_optional_becomes_none() -> None:
    arguments, _ = _name_arguments((BATCH_X, tf.experimental.Optional.empty(None)), "train")
    assert arguments[1] == ("y", None)


@pytest.mark.parametrize("run", [["x/b", "y"]], indirect=True)
@pytest.mark.usefixtures("run")
def test_single_process_refuses_absent_inputs() -> None:
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


def test_interrupt_of_a_wait_for_threads_stops_them_and_waits_for_their_end() -> None:
    is_waiting, is_stopped = threading.Event(), threading.Event()

    class Futures(list[Future[bool]]):
        def __iter__(self) -> Iterator[Future[bool]]:
            is_waiting.set()
            return super().__iter__()

    def interrupt() -> bool:
        is_waiting.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return is_stopped.wait(30)

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        futures = Futures([pool.submit(interrupt)])
        with pytest.raises(KeyboardInterrupt):
            _join(futures, lambda cause: is_stopped.set())  # type: ignore[arg-type]
        assert [future.done() and future.result() for future in futures] == [True]
