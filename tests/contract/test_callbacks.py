"""Keras's callbacks: their order in `fit`, and those that write files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.tf import initial_values, keras_training
from whale_nebula.tf import private as tf_private

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def fit_model(*callbacks: Any, epochs: int = 1) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, Y, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.parametrize(("loop", "kind"), [("fit", "train"), ("evaluate", "test"), ("predict", "predict")])
def test_list_loop_callbacks_finds_them_when_the_function_is_made(
    monkeypatch: pytest.MonkeyPatch, loop: str, kind: str
) -> None:
    found: list[Any] = []
    model, make = fit_model(), getattr(keras.Model, f"make_{kind}_function")

    def make_and_list(model: Any, force: bool = False) -> Any:
        found.extend(keras_training.list_loop_callbacks("fit", loop))
        return make(model, force)

    monkeypatch.setattr(keras.Model, f"make_{kind}_function", make_and_list)
    given = keras.callbacks.TerminateOnNaN()
    rows = (X,) if loop == "predict" else (X, Y)
    getattr(model, loop)(*rows, verbose=0, callbacks=[given])
    assert given in found and len(found) == 1 + (loop == "fit")  # and Keras's own history
    assert keras_training.list_loop_callbacks("fit", loop) == []


def test_change_fit_data_in_set_model_changes_the_training_data() -> None:
    found = []

    class DataChanger(keras.callbacks.Callback):
        def set_model(self, model: Any) -> None:
            super().set_model(model)
            found.append(model.get_weights()[0])
            found.append(
                keras_training.change_fit_data(
                    model, lambda data, batches: data.map(lambda x, y: (0.0 * x, y)).take(batches)
                )
            )

    model = fit_model(DataChanger())
    assert found[1] is True and keras_training.change_fit_data(model, lambda data, _: data) is False
    np.testing.assert_array_equal(model.get_weights()[0], found[0])  # rows of zeros give a kernel no gradient


@pytest.mark.parametrize("name", ["begin", "save", "log", "end"])
def test_replace_method_changes_the_called_method(tmp_path: Path, name: str) -> None:
    backup, called = keras.callbacks.BackupAndRestore(tmp_path / "backup"), []

    def change(plain: Any) -> Any:
        return lambda *args, **kwargs: (called.append(name), plain(*args, **kwargs))

    keras_training.replace_method(backup, name, change)
    fit_model(backup)
    assert called == [name]


@pytest.mark.parametrize(("name", "count"), [("swap", 3), ("finalize", 1)])
def test_replace_method_changes_the_methods_that_swap_averages(name: str, count: int) -> None:
    swap, called = keras.callbacks.SwapEMAWeights(swap_on_epoch=True), []

    def change(plain: Any) -> Any:
        return lambda: (called.append(name), plain())

    keras_training.replace_method(swap, name, change)
    model = fit_model()
    model.compile(keras.optimizers.SGD(use_ema=True), "mse", run_eagerly=True)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[swap])
    assert called == [name] * count


def test_find_backup_path_and_find_initial_epoch_agree_with_keras(tmp_path: Path) -> None:
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)

    first = backup()
    fit_model(first, epochs=2)
    assert Path(keras_training.find_backup_path(first)).exists()
    begun: list[int] = []
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    model = fit_model(backup(), seen, epochs=3)
    assert begun == [2] and keras_training.find_initial_epoch(model) == 2
    assert keras_training.find_initial_epoch(keras.Sequential()) == 0


def test_make_folder_creates_the_folder_of_keras(tmp_path: Path) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}" / "model.keras"))
    for _ in range(2):
        keras_training.make_folder(backup)
        keras_training.make_folder(saved, 4, None, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "backup"]
    keras_training.make_folder(keras.callbacks.ModelCheckpoint("model.keras"), 0, None, {})


@pytest.mark.parametrize("silent", [True, False])
def test_silence_removes_files_of_loggers(silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras has called `set_model`, which writes the graph, by the time the function is made."""
    loggers = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path / "events")]
    make = keras.Model.make_train_function

    def make_and_list(model: Any, force: bool = False) -> Any:
        for callback in loggers:
            keras_training.silence(callback, lambda: silent)
        return make(model, force)

    monkeypatch.setattr(keras.Model, "make_train_function", make_and_list)
    fit_model(*loggers)
    written = {path.name.split(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == (set() if silent else {"log", "events"})


def test_save_embeddings_writes_the_file_of_keras(tmp_path: Path) -> None:
    board = keras.callbacks.TensorBoard(tmp_path, embeddings_freq=2)
    board.set_model(fit_model())
    (tmp_path / "train").mkdir(exist_ok=True)
    keras_training.save_embeddings(board, 4)
    assert [path.name for path in tmp_path.rglob("*.h5")] == ["keras_embedding.ckpt-4.weights.h5"]


def test_overrides_hook_and_may_change_variables_of_callbacks() -> None:
    class OldName(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            """The name that Keras's own hook calls."""

    begin, end = "on_train_batch_begin", "on_train_batch_end"
    given = [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ModelCheckpoint("model.keras", save_freq=2),
        OldName(),
        keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None),
    ]
    for hook, overriding, changing in [(begin, [3], [3]), (end, [1, 2], [2])]:
        places = range(len(given))
        assert [n for n in places if keras_training.overrides_hook(given[n], hook)] == overriding
        assert [n for n in places if keras_training.may_change_variables(given[n], hook)] == changing


def test_suspend_saving_skips_batches(tmp_path: Path) -> None:
    saved, held = keras.callbacks.ModelCheckpoint(tmp_path / "{batch}.keras", save_freq=2), [True]
    saved.set_model(fit_model(epochs=1))
    keras_training.suspend_saving(saved, lambda: held[0])
    saved.on_epoch_begin(0)
    for batch, held[0] in [(0, True), (1, True), (2, False)]:
        saved.on_train_batch_end(batch, {})
    counted = saved._batches_seen_since_last_saving, saved._last_batch_seen
    assert counted == (0, 2) and [each.name for each in tmp_path.iterdir()] == ["3.keras"]
    keras_training.suspend_saving(keras.callbacks.CSVLogger(tmp_path / "log.csv"), lambda: True)


class BeginCallback(keras.callbacks.Callback):
    """Does something with a `fit` as it begins."""

    def __init__(self, begin: Callable[[keras_training.Fit, Any], None]) -> None:
        super().__init__()
        self.begin, self.epochs, self.batches = begin, [], 0

    def set_params(self, params: Any) -> None:
        """Keras calls it before it has all that a `fit` has."""

    def on_train_begin(self, logs: Any = None) -> None:
        fit = keras_training.find_fit()
        assert fit is not None
        self.begin(fit, self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)


def test_find_fit_returns_the_requested_epochs() -> None:
    found: list[keras_training.Fit] = []
    watch = BeginCallback(lambda fit, model: found.append(fit))
    fit_model(watch, epochs=3)
    assert (found[0].epochs, found[0].initial_epoch) == (3, 0) and watch in found[0].callbacks
    assert keras_training.find_fit() is None


@pytest.mark.parametrize("first", [False, True])
def test_add_callback_adds_first_or_last(first: bool) -> None:
    called: list[str] = []

    def note(name: str) -> Any:
        return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: called.append(name))

    def add(fit: keras_training.Fit, model: Any) -> None:
        keras_training.add_callback(fit, note("added"), model, first=first)

    fit_model(BeginCallback(add), note("given"))
    assert called == (["added", "given"] if first else ["given", "added"])


def test_is_fitting_is_true_only_within_a_fit() -> None:
    found: list[bool] = []
    fit_model(BeginCallback(lambda fit, model: found.append(keras_training.is_fitting())))
    assert found == [True] and not keras_training.is_fitting()


def test_set_initial_epoch_applies_to_the_next_fit() -> None:
    watch = BeginCallback(lambda fit, model: keras_training.set_initial_epoch(model, 2))
    model = fit_model(watch, epochs=4)
    keras_training.set_initial_epoch(model, 0)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[watch])
    assert watch.epochs == [2, 3] and model._initial_epoch == 2  # asked for again as that fit began


@pytest.mark.parametrize("steps", [pytest.param(None, marks=pytest.mark.grid), 2])
def test_skip_epochs_reads_the_data_that_training_would_read(steps: int | None) -> None:
    rows: list[list[float]] = []

    def train(begin: Callable[[keras_training.Fit, Any], None]) -> list[float]:
        """Data that is shuffled anew by whoever comes next is validation's, too, unless it is read ahead."""
        keras.utils.set_random_seed(1)
        numbers = tf.data.Dataset.range(6).map(lambda n: (tf.fill([2], tf.cast(n, tf.float32)), 1.0))
        seen: list[float] = []
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Lambda(lambda x: _note(x, seen)), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", run_eagerly=True)
        data, other = (numbers.shuffle(6).batch(2) for _ in range(2))
        model.fit(
            data.repeat() if steps else data, epochs=3, steps_per_epoch=steps, verbose=0,
            callbacks=[BeginCallback(begin)], validation_data=other if steps else data, validation_steps=steps,
        )  # fmt: skip
        return seen[-(steps or 3) * 4 :]

    def skip_two_epochs(fit: keras_training.Fit, model: Any) -> None:
        keras_training.skip_epochs(fit, 2)
        keras_training.set_initial_epoch(model, 2)

    rows = [train(lambda fit, model: None), train(skip_two_epochs)]
    assert rows[0] == rows[1] and len(rows[0]) == (steps or 3) * 4


def _note(x: Any, seen: list[float]) -> Any:
    if tf.executing_eagerly():
        seen.extend(np.asarray(x)[:, 0].tolist())
    return x


def test_append_logs_makes_a_logger_append(tmp_path: Path) -> None:
    log = str(tmp_path / "log.csv")
    fit_model(keras.callbacks.CSVLogger(log))
    logger = keras.callbacks.CSVLogger(log)
    keeps = BeginCallback(lambda fit, model: None)
    keeps.set_model = lambda model: keras_training.append_logs(_CallbackList([logger]))  # type: ignore[method-assign]
    fit_model(logger, keeps)
    assert len(Path(log).read_text().splitlines()) == 3


class _CallbackList:
    """Callbacks, as a `fit` has them."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks


def test_find_fit_ignores_a_fit_called_by_a_callback() -> None:
    found: list[keras_training.Fit | None] = []

    class Inner(BeginCallback):
        def on_train_begin(self, logs: Any = None) -> None:
            found.append(keras_training.find_fit())

    watch = BeginCallback(lambda fit, model: fit_model(Inner(lambda fit, model: None)))
    fit_model(watch)
    assert found == [None]


def test_draw_batches_returns_them_again_without_retracing() -> None:
    traces: list[int] = []

    @tf.function(reduce_retracing=True)
    def add(iterator: Any) -> Any:
        traces.append(1)
        return tf.reduce_sum(next(iterator))

    data = iter(tf.data.Dataset.range(7).map(lambda n: tf.cast(n, tf.float32)).batch(3))
    add(data)
    batches, again = keras_training.draw_batches(data, 1)
    assert [each.numpy().tolist() for each in batches] == [[3, 4, 5]] and add(again) == 12 and len(traces) == 1
    assert add(data) == 6 and keras_training.draw_batches(data, 2)[0] == []
    batches, rest = keras_training.draw_batches((n for n in range(3)), 1)
    assert (batches, list(rest)) == ([0], [0, 1, 2])


@pytest.mark.parametrize("by_batch", [pytest.param(False, marks=pytest.mark.grid), True])
def test_trace_step_creates_variables_and_list_captured_variables_finds_them(by_batch: bool) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    data = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    graph = keras_training.trace_step(model._make_function(model.train_step), next(data) if by_batch else data)
    captured = keras_training.list_captured_variables(graph)
    assert model.built and model.optimizer.built and len(model.metrics_variables) == 4  # of the loss and the metric
    expected = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    assert {id(each) for each in captured} == {id(each.value) for each in expected}
    assert {"MatMul", "AssignAddVariableOp"} < set(tf_private.list_op_types(graph))
    model.compile("adam", "mse", run_eagerly=True)
    assert keras_training.trace_step(model._make_function(model.train_step), data) is None


def test_build_model_creates_the_variables_of_a_step() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    keras_training.build_model(model, (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])))
    assert len(model.weights) == 2 and model.optimizer.built


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda inner: inner, marks=pytest.mark.grid), keras.optimizers.LossScaleOptimizer],
    ids=["plain", "scaled"],
)
def test_build_optimizer_names_variables_as_a_step_does(wrap: Callable[..., Any]) -> None:
    x, y = np.ones((2, 3), "float32"), np.ones((2, 1), "float32")
    found = {}
    for way in ("step", "model", "variables"):
        keras.utils.clear_session(free_memory=False)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="head")], name="model")
        model.compile(wrap(keras.optimizers.Adam(name="adam")), "mse", metrics=["mae"])
        if way == "step":
            model.train_on_batch(x, y)
        elif way == "model":
            keras_training.build_model(model, (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))))
        else:
            made = tf.function(lambda model=model: keras_training.create_variables(model, (x, y)), autograph=False)
            initial_values.trace_variables(made, ())
        found[way] = sorted(each.path for each in (*model.variables, *model.optimizer.variables))
    assert found["step"] == found["model"] == found["variables"]
    assert any("momentum" in each for each in found["step"])


def test_list_captured_variables_of_a_graph() -> None:
    read, written, other = (tf.Variable(1.0) for _ in range(3))

    @tf.function
    def step() -> None:
        written.assign(read + tf.constant(1.0))

    found = keras_training.list_captured_variables(step.get_concrete_function().graph)
    assert {id(each) for each in found} == {id(read), id(written)} and other is not None


def test_list_op_types_includes_functions() -> None:
    @tf.function
    def step(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.random.shuffle(x), lambda: x)

    graph = step.get_concrete_function(tf.TensorSpec([4])).graph
    assert {"Sum", "RandomShuffle"} <= set(tf_private.list_op_types(graph))


def test_TFEpochIterator_restarts_after_reset() -> None:
    """As `evaluate` in a `fit` makes it, of arrays."""
    here = tf.distribute.get_strategy()
    data = keras_training.TFEpochIterator(x=np.arange(6.0), batch_size=2, shuffle=False, distribute_strategy=here)
    for _ in range(2):
        data.reset()
        seen = [float(tf.reduce_sum(next(iterator))) for _, _, iterator in data]
        assert seen == [1.0, 5.0, 9.0]
