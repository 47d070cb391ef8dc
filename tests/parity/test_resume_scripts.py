"""Scripts that train several models, or one several times, end the same after an interruption."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity.test_resume import SimulatedKill, _finish_writing
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.errors import CheckpointError, NebulaWarning, StateError
from whale_nebula.runtime.run import current_run

CountBatch = Callable[..., None]
draws = np.random.default_rng(0)
X, Y = draws.normal(size=(80, 4)).astype("float32"), draws.normal(size=(80, 1)).astype("float32")


def build_sgd() -> keras.optimizers.Optimizer:
    """An optimizer with slots that is traced faster than Adam, which `Pair` uses."""
    return keras.optimizers.SGD(0.02, momentum=0.9, name="momentum")


def build_model(cut: bool, name: str = "model") -> keras.Model:
    """Layers have the same names in every model."""
    inputs = keras.Input((4,))
    with nb.stage(cluster="gpu") if cut else nullcontext():
        hidden = keras.layers.Dense(8, activation="relu", name="a")(inputs)
    with nb.stage(cluster="npu") if cut else nullcontext():
        outputs = keras.layers.Dense(1, name="b")(hidden)
    model = keras.Model(inputs, outputs, name=name)
    model.compile(build_sgd(), "mse")
    return model


def fit(
    model: keras.Model, count: CountBatch, epochs: int = 1, rows: int = 4, begin: int = 0
) -> dict[str, list[float]]:
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    found = model.fit(X[begin:], Y[begin:], batch_size=rows, epochs=epochs, verbose=0, callbacks=[counter])
    return {**found.history, "epoch": found.epoch}


def train_in_sequence(cut: bool, count: CountBatch) -> Any:
    """What is written to a model before the `fit` that is resumed is replaced, and what is written after it stays, even
    if the model has been trained before.
    """
    first, second = build_model(cut, "first"), build_model(cut, "second")
    histories = [fit(first, count)]
    second.set_weights([each * 0.5 for each in second.get_weights()])
    histories.append(fit(second, count))
    first.optimizer.learning_rate.assign(0.001)
    histories.append(fit(first, count, rows=8))
    return histories, second.evaluate(X, Y, verbose=0), first.get_weights(), second.get_weights()


def fit_twice(cut: bool, count: CountBatch) -> Any:
    """Weights are overwritten between two `fit`s, which must not affect a resumed second `fit`."""
    model = build_model(cut)
    before = fit(model, count, rows=4)
    model.evaluate(X, Y, verbose=0)
    model.set_weights([each * 0.5 for each in model.get_weights()])
    return before, fit(model, count, 2, rows=4), model.get_weights()


def fit_clusters_twice(cut: bool, count: CountBatch) -> Any:
    """Like `fit_twice`, with local SGD, whose shared weights are overwritten as well."""
    model = build_model(False)
    with nb.cluster(["gpu", "npu"]), nb.replica(sync_every=4, outer="nesterov", delay=1):
        before = fit(model, count, rows=8)
        model.set_weights([each * 0.5 for each in model.get_weights()])
        return before, fit(model, count, 2, rows=8), model.get_weights()


def train_folds(cut: bool, count: CountBatch) -> Any:
    """Models of the same names, one after the other."""
    kept, histories = [], []
    for fold in range(3):
        keras.utils.clear_session(free_memory=False)
        kept.append(build_model(cut))
        histories.append(fit(kept[-1], count, 2, rows=8, begin=20 * fold))
    return histories, [model.get_weights() for model in kept]


def train_folds_with_late_codec(cut: bool, count: CountBatch) -> Any:
    """A model that is created again counts its own steps, after which its codec begins."""
    kept, histories = [], []
    for _ in range(2):
        keras.utils.clear_session(free_memory=False)
        with nb.compress("int8", start_step=6):
            kept.append(build_model(cut))
        histories.append(fit(kept[-1], count, 2, rows=8))
    return histories, [model.get_weights() for model in kept]


def train_released_folds(cut: bool, count: CountBatch) -> Any:
    for fold in range(3):
        keras.utils.clear_session(free_memory=False)
        model = build_model(cut)
        fit(model, count, 2, rows=8, begin=20 * fold)
        del model
        gc.collect()


def train_on_batches(cut: bool, count: CountBatch) -> Any:
    os.chdir("..")  # the folder of checkpoints does not depend on the working directory
    model, losses = build_model(cut), []
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 12):
        losses.append(float(model.train_on_batch(X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4])))
        count()
    return losses[-1], model.get_weights()


def train_with_duplicate_metrics(cut: bool, count: CountBatch) -> Any:
    model = build_model(cut)
    model.compile(build_sgd(), "mse", metrics=["mae"], weighted_metrics=["mae"])
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    history = model.fit(X, Y, 4, 2, sample_weight=Y[:, 0] ** 2, verbose=0, callbacks=[counter]).history
    return dict(history), model.get_weights()


def train_inside_a_callback(cut: bool, count: CountBatch) -> Any:
    outer, inner = build_model(cut, "outer"), build_model(cut, "inner")

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            inner.fit(X, Y, batch_size=40, verbose=0)

    callbacks = [Inner(), keras.callbacks.LambdaCallback(on_train_batch_end=count)]
    history = outer.fit(X, Y, batch_size=10, epochs=4, verbose=0, callbacks=callbacks).history
    return history, outer.get_weights(), inner.get_weights()


class Pair(keras.Model):
    """A custom train step: two optimizers, random numbers of Keras and TensorFlow without a seed, and a counter."""

    def __init__(self, cut: bool) -> None:
        super().__init__(name="pair")
        self.cut, self.first, self.last = cut, keras.layers.Dense(4, name="a"), keras.layers.Dense(1, name="b")
        self.calls = tf.Variable(0.0)
        self.mean = keras.metrics.Mean(name="loss")

    def compile(self) -> None:
        super().compile()
        self.optimizers = [keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.05)]

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]

    def call(self, x: Any) -> Any:
        with nb.stage(cluster="gpu") if self.cut else nullcontext():
            x = self.first(x)
        with nb.stage(cluster="npu") if self.cut else nullcontext():
            return self.last(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.calls.assign_add(1.0)
        x = x + keras.random.normal(tf.shape(x)) + tf.random.normal(tf.shape(x)) * self.calls
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = iter(tape.gradient(loss, self.trainable_variables))
        for layer, optimizer in zip((self.first, self.last), self.optimizers, strict=True):
            optimizer.apply([next(gradients) for _ in layer.trainable_variables], layer.trainable_variables)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


def run_custom_train_step(cut: bool, count: CountBatch) -> Any:
    model = Pair(cut)
    model.compile()
    return fit(model, count, 2, rows=8), model.get_weights(), [each.variables for each in model.optimizers]


def share_shuffled_dataset(cut: bool, count: CountBatch) -> Any:
    """One dataset, shuffled again in each pass, for two fits and their validation."""
    model, data = build_model(cut), tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(80).batch(16)
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    fit_histories = [
        dict(model.fit(data, epochs=n, validation_data=data, callbacks=[counter], verbose=0).history) for n in (1, 3)
    ]
    return fit_histories, model.get_weights()


class NumberLog:
    """A list of numbers whose state is the list itself."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def run_stateful_loop(cut: bool, count: CountBatch) -> Any:
    """A loop with saved objects, variables that are written after the step, and two steps with random numbers. The
    losses of the first are scaled, and some overflow.
    """
    model, other = build_model(cut, "first"), build_model(cut, "second")
    model.optimizer = keras.optimizers.LossScaleOptimizer(build_sgd(), initial_scale=2.0**126, dynamic_growth_steps=4)
    draws, other_draws = np.random.default_rng(1), random.Random(1)
    mean, kept = keras.metrics.Mean(), tf.Variable(tf.zeros((8, 1)))
    seen = NumberLog()
    nb.state(draws=draws, other=other_draws, mean=mean, kept=kept, seen=seen)

    def train(model: keras.Model, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            x = x + tf.random.normal(tf.shape(x), seed=5) - tf.random.normal(tf.shape(x), seed=5)
            loss = tf.reduce_mean((model(x + tf.random.uniform(tf.shape(x))) - y) ** 2)
            scaled = model.optimizer.scale_loss(loss)
        model.optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    @nb.function
    def train_first(x: Any, y: Any) -> Any:
        return train(model, x, y)

    @nb.function
    def train_second(x: Any, y: Any) -> Any:
        return train(other, x, y)

    for number in range(0 if nb.resumed() is None else nb.resumed().step, 12):
        seen.numbers.append(number)
        mean.update_state(train_first(draws.normal(size=(8, 4)).astype("float32"), Y[:8] * 99 * other_draws.random()))
        mean.update_state(train_second(draws.normal(size=(8, 4)).astype("float32"), Y[:8]))
        kept.assign(0.5 * kept + model.get_layer("b").kernel)
        count()
    scales = [each.numpy() for each in model.optimizer.variables]
    assert scales[3] < 2.0**126 and 0 < scales[4] < 12
    return mean.variables, kept, model.get_weights(), scales, other.get_weights(), seen.numbers


def make_step(model: keras.Model) -> Callable[[Any, Any], Any]:
    """A step of the same name for every model."""
    return nb.function(lambda x, y: model.train_step((x, y)))


def run_steps_of_one_name(cut: bool, count: CountBatch) -> Any:
    """Two models in one loop; the second trains two steps in each iteration."""
    first, second = build_model(cut, "first"), build_model(cut, "second")
    train_first, train_second = make_step(first), make_step(second)
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 12):
        train_first(X[number : number + 4], Y[number : number + 4])
        train_second(X[number : number + 4], Y[number : number + 4])
        train_second(X[number : number + 8], Y[number : number + 8])
        count()
    return first.get_weights(), second.get_weights()


def run_two_loops(cut: bool, count: CountBatch) -> Any:
    """Two models of one name, the second after the first."""
    first, second = build_model(cut), build_model(cut)
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 60):
        (first if number < 10 else second).train_on_batch(X[number : number + 4], Y[number : number + 4])
        count()
    return first.predict(X, verbose=0), second.get_weights()


def run_two_loops_with_predictions(cut: bool, count: CountBatch) -> Any:
    """Two models of one name; a resumed run predicts with the second before it trains it."""
    first, second = build_model(cut), build_model(cut)
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 60):
        model = first if number < 10 else second
        model.predict(X[:4], verbose=0)
        model.train_on_batch(X[number : number + 4], Y[number : number + 4])
        count()
    return second.get_weights()


def run_script(
    script: Callable[[bool, CountBatch], Any],
    folder: Path,
    cut: bool,
    stop: int = 0,
    error: type[BaseException] = SimulatedKill,
) -> Any:
    """Run a script, or stop it after this number of batches, by this error."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    seen = 0

    def count(*_: Any, **__: Any) -> None:
        nonlocal seen
        seen += 1
        _finish_writing(current_run().checkpoints)
        if seen == stop:
            raise error

    with nb.init(checkpoint={"folder": str(folder), "every": 3}) as run:
        try:
            return tf.nest.map_structure(lambda each: np.asarray(each).tobytes(), script(cut, count))
        except SimulatedKill:
            run.checkpoints.failed = True


def read_counts(folder: Path) -> tuple[int, Any]:
    """The steps of the run and those of each program in the newest checkpoint."""
    [manifest] = Folder(str(folder)).scan()[0].manifests.values()
    position = manifest.position
    return position.step, position.programs


SCRIPTS = [
    pytest.param(train_in_sequence, 35, False, marks=pytest.mark.grid),
    pytest.param(train_in_sequence, 35, True),
    pytest.param(fit_twice, 36, False, marks=pytest.mark.grid),
    pytest.param(fit_twice, 36, True, marks=pytest.mark.grid),
    pytest.param(fit_clusters_twice, 23, True, marks=pytest.mark.grid),
    pytest.param(train_folds, 10, False, marks=pytest.mark.grid),
    pytest.param(train_folds, 24, True, marks=pytest.mark.grid),  # as `train_folds_with_late_codec`
    pytest.param(train_folds, 45, False, marks=pytest.mark.grid),
    pytest.param(
        train_folds_with_late_codec,
        10,
        True,
        marks=[pytest.mark.grid, pytest.mark.filterwarnings("error:.*their initial values")],
    ),
    pytest.param(train_on_batches, 7, False),
    pytest.param(train_on_batches, 7, True, marks=pytest.mark.grid),
    pytest.param(train_with_duplicate_metrics, 15, False, marks=pytest.mark.grid),
    pytest.param(train_with_duplicate_metrics, 15, True, marks=pytest.mark.grid),
    pytest.param(train_inside_a_callback, 14, False, marks=pytest.mark.grid),
    pytest.param(train_inside_a_callback, 14, True, marks=pytest.mark.grid),
    pytest.param(run_custom_train_step, 14, False, marks=pytest.mark.grid),
    pytest.param(run_custom_train_step, 14, True, marks=pytest.mark.grid),
    pytest.param(share_shuffled_dataset, 12, False, marks=pytest.mark.grid),
    pytest.param(share_shuffled_dataset, 12, True, marks=pytest.mark.grid),
    pytest.param(
        run_stateful_loop,
        7,
        False,
        marks=[pytest.mark.grid, pytest.mark.filterwarnings("ignore:.*runs uncut")],
    ),
    pytest.param(run_stateful_loop, 7, True, marks=pytest.mark.grid),  # see test_save_at_error
    pytest.param(run_steps_of_one_name, 7, True, marks=pytest.mark.grid),
    pytest.param(run_two_loops, 8, False, marks=pytest.mark.grid),
    pytest.param(run_two_loops, (55, 7), False),  # stopped twice in the second loop
    pytest.param(run_two_loops, (55, 7), True, marks=pytest.mark.grid),
    *(
        pytest.param(
            run_two_loops_with_predictions,
            55,
            cut,
            marks=[pytest.mark.grid, pytest.mark.filterwarnings("ignore:.*had the weights of another one")],
        )
        for cut in (False, True)
    ),
]


@pytest.mark.parametrize(("script", "stop", "cut"), SCRIPTS)
def test_interrupted_script_resumes_exactly(
    script: Callable[[bool, CountBatch], Any],
    stop: int | tuple[int, ...],
    cut: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = run_script(script, tmp_path / "undisturbed", cut)
    for each in (stop,) if isinstance(stop, int) else stop:
        monkeypatch.chdir(tmp_path)
        assert run_script(script, Path("broken"), cut, each) is None
    monkeypatch.chdir(tmp_path)
    assert run_script(script, Path("broken"), cut) == expected
    assert read_counts(tmp_path / "broken") == read_counts(tmp_path / "undisturbed")


def test_error_after_resumption_keeps_models_of_earlier_loops(tmp_path: Path) -> None:
    """The checkpoint that is saved at the error contains the first model, which the second loop does not use."""
    expected = run_script(run_two_loops, tmp_path / "undisturbed", False)
    run_script(run_two_loops, tmp_path / "broken", False, 55)
    with pytest.raises(ArithmeticError):
        run_script(run_two_loops, tmp_path / "broken", False, 2, ArithmeticError)
    assert read_counts(tmp_path / "broken")[0] == 54
    assert run_script(run_two_loops, tmp_path / "broken", False) == expected


def test_fit_with_fewer_epochs_than_trained_restores_the_model(tmp_path: Path) -> None:
    """The `fit` trains nothing, and the next one may have other batches."""

    def train(epochs: int, count: CountBatch) -> Any:
        model = build_model(False)
        return fit(model, count, epochs, rows=8)["loss"], int(model.optimizer.iterations), fit(model, count, rows=4)

    run_script(lambda _, count: train(3, count), tmp_path, False, 13)
    losses, steps, _ = run_script(lambda _, count: train(1, count), tmp_path, False)
    assert len(losses) == 1 and np.frombuffer(steps, "int64")[0] == 12


@pytest.mark.parametrize(
    ("script", "steps"), [pytest.param(run_steps_of_one_name, 12, marks=pytest.mark.grid), (run_two_loops, 60)]
)
@pytest.mark.filterwarnings("ignore:.*runs uncut")
def test_loop_steps_are_counted_once(
    script: Callable[[bool, CountBatch], Any], steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_script(script, tmp_path, False)
    with nb.init(checkpoint=str(tmp_path)):
        assert nb.resumed() is not None and nb.resumed().step == steps
        with pytest.raises(CheckpointError, match="a model cannot be saved to the checkpoint folder of a run"):
            nb.save(tmp_path, build_model(False))


def test_results_that_are_no_numbers_do_not_prevent_saving(tmp_path: Path) -> None:
    class Detailed(Pair):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {**super().train_step(data), "parts": {"first": tf.constant(2.0)}, "each": tf.zeros(3)}

    def script(cut: bool, count: CountBatch) -> Any:
        model = Detailed(cut)
        model.compile()
        return fit(model, count, rows=20)["first"]

    run_script(script, tmp_path, False)
    [manifest] = Folder(str(tmp_path)).scan()[0].manifests.values()
    assert manifest.position.step == 4 and sorted(manifest.position.logs) == ["first", "loss"]


def test_models_of_a_run_are_restored_by_name(tmp_path: Path) -> None:
    *_, first, second = run_script(train_in_sequence, tmp_path, False)
    keras.utils.clear_session(free_memory=False)  # optimizers are numbered as they were in the run
    for model, expected in [(build_model(True, "first"), first), (build_model(True, "second"), second)]:
        nb.restore(tmp_path, model)
        assert [each.tobytes() for each in model.get_weights()] == expected
    keras.utils.clear_session(free_memory=False)
    with pytest.warns(NebulaWarning, match="several models of that run have a variable"):
        nb.restore(tmp_path, build_model(True, "third"))


def test_variables_not_read_by_the_step_are_saved(tmp_path: Path) -> None:
    """Counters of a LossScaleOptimizer, and a weight that only inference uses."""

    class Measured(keras.layers.Dense):
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.other = self.add_weight(shape=(), name="other", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            return super().call(x) if training else super().call(x) + self.other

    def script(cut: bool, count: CountBatch) -> Any:
        with nb.stage(cluster="gpu") if cut else nullcontext():
            model = keras.Sequential([keras.Input((4,)), Measured(1, name="a")], name="model")
        model.layers[0].other.assign(5.0 if cut else 0.0)
        model.compile(keras.optimizers.LossScaleOptimizer(build_sgd()), "mse")
        fit(model, count, 1 if cut else 2, rows=40)
        return model.get_weights(), model.optimizer.inner_optimizer.iterations

    cut, _ = run_script(script, tmp_path, True)
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((4,)), Measured(1, name="a")], name="model")
    model.compile(keras.optimizers.LossScaleOptimizer(build_sgd()), "mse")
    nb.restore(tmp_path, model)
    assert [each.tobytes() for each in model.get_weights()] == cut
    weights, steps = run_script(script, tmp_path, False)
    assert weights[-1] == cut[-1] == np.float32(5).tobytes() and int.from_bytes(steps, "little") == 4


def test_unsaved_random_state_is_reported(tmp_path: Path) -> None:
    def script(cut: bool, count: CountBatch) -> None:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: tf.random.shuffle(x))])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        fit(model, count, rows=40)

    with pytest.warns(NebulaWarning, match="the random state of RandomShuffle in .*train_step is not saved"):
        run_script(script, tmp_path, False)


def test_eager_step_warns_about_unsaved_variables(tmp_path: Path) -> None:
    def script(cut: bool, count: CountBatch) -> None:
        model = build_model(cut)
        model.compile("sgd", "mse", run_eagerly=True)
        fit(model, count, rows=40)

    with pytest.warns(
        NebulaWarning, match="model.train_step runs eagerly, so only the variables of its model are saved"
    ):
        run_script(script, tmp_path, False)


def test_released_model_is_reported_as_missing(tmp_path: Path) -> None:
    assert run_script(train_released_folds, tmp_path, False, 46) is None
    with pytest.raises(CheckpointError, match="is not in the checkpoint") as caught:
        run_script(train_released_folds, tmp_path, False)
    assert "no longer existed" in caught.value.why and "in a list" in caught.value.mend


# ------------------------------------------------------------------ no scopes
def fit_other_rows(cut: bool, count: CountBatch) -> Any:
    return fit(build_model(cut), count, 2, rows=5, begin=10)


def fit_two_steps_at_once(cut: bool, count: CountBatch) -> Any:
    model = build_model(cut)
    model.compile(build_sgd(), "mse", steps_per_execution=2)
    return fit(model, count, 2, rows=4)


@pytest.mark.parametrize("other", [pytest.param(fit_other_rows, marks=pytest.mark.grid), fit_two_steps_at_once])
def test_different_batches_without_scopes_are_refused(other: Callable[[bool, CountBatch], Any], tmp_path: Path) -> None:
    assert run_script(lambda cut, count: fit(build_model(cut), count, 2, rows=4), tmp_path, False, 15) is None
    with pytest.raises(CheckpointError, match="differs from the one that this run had before it stopped"):
        run_script(other, tmp_path, False)


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_slots_of_another_optimizer_cause_a_warning(cut: bool, tmp_path: Path) -> None:
    def script(cut: bool, count: CountBatch, kind: type = keras.optimizers.AdamW) -> Any:
        model = build_model(cut)
        model.compile(kind(0.02), "mse")
        return fit(model, count, 2, rows=4)

    assert run_script(lambda cut, count: script(cut, count, keras.optimizers.Lion), tmp_path, cut, 15) is None
    with pytest.warns(NebulaWarning, match="'adam_w/.* of model.train_step are not in the checkpoint, and keep their"):
        run_script(script, tmp_path, cut)


def skip_first_fit_when_resumed(cut: bool, count: CountBatch) -> None:
    model = build_model(cut)
    if nb.resumed() is None:
        fit(model, count, rows=8)
    fit(model, count, 2, rows=8)


def run_loop(cut: bool, count: CountBatch) -> None:
    model = build_model(cut)
    step = nb.function(lambda x, y: model.train_step((x, y)))
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 4):
        step(X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4])


def run_tensorflow_loop(cut: bool, count: CountBatch) -> None:
    model = build_model(cut)
    tf.function(lambda: model.train_step((X, Y)))()


@pytest.mark.parametrize(
    ("script", "stop", "expected_message"),
    [
        (
            skip_first_fit_when_resumed,
            15,
            "this run was saved in fit 2, but the script has now called fit 1 time",
        ),
        (run_loop, 0, "the checkpoint of step 4 was not read"),
        (run_tensorflow_loop, 0, "nothing was saved"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*runs uncut")
def test_untrained_checkpoint_is_reported(
    script: Callable[[bool, CountBatch], Any],
    stop: int,
    expected_message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if script is not run_tensorflow_loop:
        run_script(script, tmp_path, True, stop)
    run_script(script, tmp_path, True)
    messages = [
        each.message for each in caplog.records if each.name != "tensorflow"
    ]  # TensorFlow's depend on earlier tests
    assert [expected_message in each for each in messages] == [True]


@pytest.mark.parametrize("call", [nb.save, nb.restore])
def test_model_without_variables_is_refused(call: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="which has no variables yet"):
        call(tmp_path, keras.Sequential([keras.layers.Dense(1)]))
