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
from tests.parity.test_resume import Killed, _settle
from whale_nebula.errors import CheckpointError, NebulaWarning, StateError
from whale_nebula.runtime.run import current_run

Count = Callable[..., None]
draws = np.random.default_rng(0)
X, Y = draws.normal(size=(80, 4)).astype("float32"), draws.normal(size=(80, 1)).astype("float32")


def momentum() -> keras.optimizers.Optimizer:
    """It has slots, and is traced in less time than Adam, which `Pair` has."""
    return keras.optimizers.SGD(0.02, momentum=0.9, name="momentum")


def build(cut: bool, name: str = "model") -> keras.Model:
    """Layers have the same names in every model."""
    inputs = keras.Input((4,))
    with nb.stage(cluster="gpu") if cut else nullcontext():
        hidden = keras.layers.Dense(8, activation="relu", name="a")(inputs)
    with nb.stage(cluster="npu") if cut else nullcontext():
        outputs = keras.layers.Dense(1, name="b")(hidden)
    model = keras.Model(inputs, outputs, name=name)
    model.compile(momentum(), "mse")
    return model


def fit(model: keras.Model, count: Count, epochs: int = 1, rows: int = 4, begin: int = 0) -> dict[str, list[float]]:
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    found = model.fit(X[begin:], Y[begin:], batch_size=rows, epochs=epochs, verbose=0, callbacks=[counting])
    return dict(found.history)


def one_after_the_other(cut: bool, count: Count) -> Any:
    first, second = build(cut, "first"), build(cut, "second")
    return fit(first, count), fit(second, count), first.get_weights(), second.get_weights()


def twice_with_a_look_between(cut: bool, count: Count) -> Any:
    """What is written between is not what the second `fit` had come to."""
    model = build(cut)
    before = fit(model, count, rows=4)
    model.evaluate(X, Y, verbose=0)
    model.set_weights([each * 0.5 for each in model.get_weights()])
    return before, fit(model, count, 2, rows=4), model.get_weights()


def folds(cut: bool, count: Count) -> Any:
    """Models of the same names, one after the other."""
    kept, histories = [], []
    for fold in range(3):
        keras.utils.clear_session(free_memory=False)
        kept.append(build(cut))
        histories.append(fit(kept[-1], count, 2, rows=8, begin=20 * fold))
    return histories, [model.get_weights() for model in kept]


def folds_that_begin_exact(cut: bool, count: Count) -> Any:
    """A model that is made again counts its own steps: a codec begins as late in each."""
    kept, histories = [], []
    for _ in range(2):
        keras.utils.clear_session(free_memory=False)
        with nb.compress("int8", start_step=6):
            kept.append(build(cut))
        histories.append(fit(kept[-1], count, 2, rows=8))
    return histories, [model.get_weights() for model in kept]


def folds_let_go(cut: bool, count: Count) -> Any:
    for fold in range(3):
        keras.utils.clear_session(free_memory=False)
        model = build(cut)
        fit(model, count, 2, rows=8, begin=20 * fold)
        del model
        gc.collect()


def batches_by_hand(cut: bool, count: Count) -> Any:
    os.chdir("..")  # a folder of checkpoints stays where it was
    model, losses = build(cut), []
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 12):
        losses.append(float(model.train_on_batch(X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4])))
        count()
    return losses[-1], model.get_weights()


def metrics_of_one_name(cut: bool, count: Count) -> Any:
    model = build(cut)
    model.compile(momentum(), "mse", metrics=["mae"], weighted_metrics=["mae"])
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    history = model.fit(X, Y, 4, 2, sample_weight=Y[:, 0] ** 2, verbose=0, callbacks=[counting]).history
    return dict(history), model.get_weights()


def a_model_trained_by_a_callback(cut: bool, count: Count) -> Any:
    outer, inner = build(cut, "outer"), build(cut, "inner")

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            inner.fit(X, Y, batch_size=40, verbose=0)

    callbacks = [Inner(), keras.callbacks.LambdaCallback(on_train_batch_end=count)]
    history = outer.fit(X, Y, batch_size=10, epochs=4, verbose=0, callbacks=callbacks).history
    return history, outer.get_weights(), inner.get_weights()


class Pair(keras.Model):
    """A train step of its own: two optimizers, draws by nobody's seed of Keras's and TensorFlow's, and a counter."""

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


def a_train_step_of_its_own(cut: bool, count: Count) -> Any:
    model = Pair(cut)
    model.compile()
    return fit(model, count, 2, rows=8), model.get_weights(), [each.variables for each in model.optimizers]


def shuffled_data_of_all(cut: bool, count: Count) -> Any:
    """One dataset, which is shuffled anew for whoever comes next: two fits and their validation."""
    model, data = build(cut), tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(80).batch(16)
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    told = [
        dict(model.fit(data, epochs=n, validation_data=data, callbacks=[counting], verbose=0).history) for n in (1, 3)
    ]
    return told, model.get_weights()


class Seen:
    """What a loop has seen; its state is the list itself."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def a_loop_that_remembers(cut: bool, count: Count) -> Any:
    """What is written to variables after the step counts; a second step draws, too. The losses of the first are scaled,
    and some overflow.
    """
    model, other = build(cut, "first"), build(cut, "second")
    model.optimizer = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=2.0**126, dynamic_growth_steps=4)
    draws, other_draws = np.random.default_rng(1), random.Random(1)
    mean, kept = keras.metrics.Mean(), tf.Variable(tf.zeros((8, 1)))
    seen = Seen()
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


def steps_of_one_name(cut: bool, count: Count) -> Any:
    """Two models in one loop, one of which takes two steps in each turn."""
    first, second = build(cut, "first"), build(cut, "second")
    train_first, train_second = make_step(first), make_step(second)
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 12):
        train_first(X[number : number + 4], Y[number : number + 4])
        train_second(X[number : number + 4], Y[number : number + 4])
        train_second(X[number : number + 8], Y[number : number + 8])
        count()
    return first.get_weights(), second.get_weights()


def two_loops(cut: bool, count: Count) -> Any:
    """Two models of one name, the second after the first."""
    first, second = build(cut), build(cut)
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 20):
        (first if number < 10 else second).train_on_batch(X[number : number + 4], Y[number : number + 4])
        count()
    return first.get_weights(), second.get_weights()


def run(script: Callable[[bool, Count], Any], folder: Path, cut: bool, stop: int = 0) -> Any:
    """Run a script, or until so many batches of its own were trained in this process."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    seen = 0

    def count(*_: Any, **__: Any) -> None:
        nonlocal seen
        seen += 1
        _settle(current_run().checkpoints)
        if seen == stop:
            raise Killed

    with nb.init(checkpoint={"folder": str(folder), "every": 3}) as opened:
        try:
            return tf.nest.map_structure(lambda each: np.asarray(each).tobytes(), script(cut, count))
        except Killed:
            opened.checkpoints.failed = True


GOES_ON = [
    pytest.param(one_after_the_other, 35, False, marks=pytest.mark.grid),
    pytest.param(one_after_the_other, 35, True, marks=pytest.mark.grid),
    pytest.param(twice_with_a_look_between, 36, False, marks=pytest.mark.grid),
    pytest.param(twice_with_a_look_between, 36, True),
    pytest.param(folds, 10, False, marks=pytest.mark.grid),
    pytest.param(folds, 24, True, marks=pytest.mark.grid),  # with scopes, those of `folds_that_begin_exact` are made
    pytest.param(folds, 45, False, marks=pytest.mark.grid),
    pytest.param(
        folds_that_begin_exact,
        10,
        True,
        marks=[pytest.mark.grid, pytest.mark.filterwarnings("error:.*their initial values")],
    ),
    pytest.param(batches_by_hand, 7, False),
    pytest.param(batches_by_hand, 7, True, marks=pytest.mark.grid),
    pytest.param(metrics_of_one_name, 15, False, marks=pytest.mark.grid),
    pytest.param(metrics_of_one_name, 15, True, marks=pytest.mark.grid),
    pytest.param(a_model_trained_by_a_callback, 14, False, marks=pytest.mark.grid),
    pytest.param(a_model_trained_by_a_callback, 14, True, marks=pytest.mark.grid),
    pytest.param(a_train_step_of_its_own, 14, False, marks=pytest.mark.grid),
    pytest.param(a_train_step_of_its_own, 14, True, marks=pytest.mark.grid),
    pytest.param(shuffled_data_of_all, 12, False),
    pytest.param(shuffled_data_of_all, 12, True, marks=pytest.mark.grid),
    pytest.param(a_loop_that_remembers, 7, False, marks=pytest.mark.filterwarnings("ignore:.*runs uncut")),
    pytest.param(a_loop_that_remembers, 7, True, marks=pytest.mark.grid),  # see test_save_at_error
    pytest.param(steps_of_one_name, 7, True, marks=pytest.mark.grid),
    pytest.param(two_loops, 8, False, marks=pytest.mark.grid),
]


@pytest.mark.parametrize(("script", "stop", "cut"), GOES_ON)
def test_a_script_goes_on(
    script: Callable[[bool, Count], Any], stop: int, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = run(script, tmp_path / "undisturbed", cut)
    monkeypatch.chdir(tmp_path)
    assert run(script, Path("broken"), cut, stop) is None
    monkeypatch.chdir(tmp_path)
    assert run(script, Path("broken"), cut) == expected


@pytest.mark.parametrize(
    ("script", "steps"), [pytest.param(steps_of_one_name, 12, marks=pytest.mark.grid), (two_loops, 20)]
)
@pytest.mark.filterwarnings("ignore:.*runs uncut")
def test_steps_of_a_loop_are_counted_once(
    script: Callable[[bool, Count], Any], steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(script, tmp_path, False)
    with nb.init(checkpoint=str(tmp_path)):
        assert nb.resumed() is not None and nb.resumed().step == steps
        with pytest.raises(CheckpointError, match="a model cannot be saved to the checkpoint folder of a run"):
            nb.save(tmp_path, build(False))


def test_models_of_a_run_are_restored_by_their_names(tmp_path: Path) -> None:
    *_, first, second = run(one_after_the_other, tmp_path, False)
    keras.utils.clear_session(free_memory=False)  # optimizers are numbered as they were in the run
    for model, expected in [(build(True, "first"), first), (build(True, "second"), second)]:
        nb.restore(tmp_path, model)
        assert [each.tobytes() for each in model.get_weights()] == expected
    keras.utils.clear_session(free_memory=False)
    with pytest.warns(NebulaWarning, match="several models of that run have a variable"):
        nb.restore(tmp_path, build(True, "third"))


def test_what_a_cut_step_does_not_read_is_saved(tmp_path: Path) -> None:
    """Counters of a LossScaleOptimizer's own, and a weight for inference alone: nothing is missed without scopes."""

    class Measured(keras.layers.Dense):
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.other = self.add_weight(shape=(), name="other", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            return super().call(x) if training else super().call(x) + self.other

    def script(cut: bool, count: Count) -> Any:
        with nb.stage(cluster="gpu") if cut else nullcontext():
            model = keras.Sequential([keras.Input((4,)), Measured(1, name="a")], name="model")
        model.layers[0].other.assign(5.0 if cut else 0.0)
        model.compile(keras.optimizers.LossScaleOptimizer(momentum()), "mse")
        fit(model, count, 1 if cut else 2, rows=40)
        return model.get_weights(), model.optimizer.inner_optimizer.iterations

    cut, _ = run(script, tmp_path, True)
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((4,)), Measured(1, name="a")], name="model")
    model.compile(keras.optimizers.LossScaleOptimizer(momentum()), "mse")
    nb.restore(tmp_path, model)
    assert [each.tobytes() for each in model.get_weights()] == cut
    weights, steps = run(script, tmp_path, False)
    assert weights[-1] == cut[-1] == np.float32(5).tobytes() and int.from_bytes(steps, "little") == 4


def test_draws_that_are_not_saved_are_named(tmp_path: Path) -> None:
    def script(cut: bool, count: Count) -> None:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: tf.random.shuffle(x))])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        fit(model, count, rows=40)

    with pytest.warns(NebulaWarning, match="the random state of RandomShuffle in .*train_step is not saved"):
        run(script, tmp_path, False)


def test_what_is_saved_of_an_eager_step_is_said(tmp_path: Path) -> None:
    def script(cut: bool, count: Count) -> None:
        model = build(cut)
        model.compile("sgd", "mse", run_eagerly=True)
        fit(model, count, rows=40)

    with pytest.warns(
        NebulaWarning, match="model.train_step runs eagerly, so only the variables of its model are saved"
    ):
        run(script, tmp_path, False)


def test_a_model_that_was_let_go_is_missed(tmp_path: Path) -> None:
    assert run(folds_let_go, tmp_path, False, 46) is None
    with pytest.raises(CheckpointError, match="is not in the checkpoint") as caught:
        run(folds_let_go, tmp_path, False)
    assert "no longer existed" in caught.value.why and "in a list" in caught.value.mend


# ------------------------------------------------------------------ no scopes: what was not noticed
def other_rows(cut: bool, count: Count) -> Any:
    return fit(build(cut), count, 2, rows=5, begin=10)


def two_at_once(cut: bool, count: Count) -> Any:
    model = build(cut)
    model.compile(momentum(), "mse", steps_per_execution=2)
    return fit(model, count, 2, rows=4)


@pytest.mark.parametrize("other", [pytest.param(other_rows, marks=pytest.mark.grid), two_at_once])
def test_other_batches_of_a_model_without_scopes_are_named(other: Callable[[bool, Count], Any], tmp_path: Path) -> None:
    assert run(lambda cut, count: fit(build(cut), count, 2, rows=4), tmp_path, False, 15) is None
    with pytest.raises(CheckpointError, match="differs from the one that this run had before it stopped"):
        run(other, tmp_path, False)


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_slots_of_another_optimizer_begin_anew_and_a_warning_says_so(cut: bool, tmp_path: Path) -> None:
    def script(cut: bool, count: Count, kind: type = keras.optimizers.AdamW) -> Any:
        model = build(cut)
        model.compile(kind(0.02), "mse")
        return fit(model, count, 2, rows=4)

    assert run(lambda cut, count: script(cut, count, keras.optimizers.Lion), tmp_path, cut, 15) is None
    with pytest.warns(NebulaWarning, match="'adam_w/.* of model.train_step are not in the checkpoint, and keep their"):
        run(script, tmp_path, cut)


def a_first_fit_only_at_first(cut: bool, count: Count) -> None:
    model = build(cut)
    if nb.resumed() is None:
        fit(model, count, rows=8)
    fit(model, count, 2, rows=8)


def a_loop(cut: bool, count: Count) -> None:
    model = build(cut)
    step = nb.function(lambda x, y: model.train_step((x, y)))
    for number in range(0 if nb.resumed() is None else nb.resumed().step, 4):
        step(X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4])


def a_loop_of_tensorflow(cut: bool, count: Count) -> None:
    model = build(cut)
    tf.function(lambda: model.train_step((X, Y)))()


@pytest.mark.parametrize(
    ("script", "stop", "said"),
    [
        (
            a_first_fit_only_at_first,
            15,
            "this run was saved in fit 2, but the script has now called fit 1 time",
        ),
        (a_loop, 0, "the checkpoint of step 4 was not read"),
        (a_loop_of_tensorflow, 0, "nothing was saved"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*runs uncut")
def test_what_was_not_trained_is_said(
    script: Callable[[bool, Count], Any], stop: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if script is not a_loop_of_tensorflow:
        run(script, tmp_path, True, stop)
    run(script, tmp_path, True)
    messages = [each.message for each in caplog.records if each.name != "tensorflow"]  # that one counts what ran before
    assert [said in each for each in messages] == [True]


@pytest.mark.parametrize("call", [nb.save, nb.restore])
def test_a_model_without_variables_is_refused(call: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="which has no variables yet"):
        call(tmp_path, keras.Sequential([keras.layers.Dense(1)]))
