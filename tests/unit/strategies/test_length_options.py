"""Numbers of micro-batches and codecs that a curriculum gives by length, in `fit` and in loops."""

from __future__ import annotations

import contextlib
import functools
import threading
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NebulaError, NotYetError, OptionError, StateError
from whale_nebula.strategies import Curriculum, OneBitAdam

LENGTH = 32
CLUSTERS = {"clusters": {name: {"flops": "1M"} for name in ("gpu", "npu")}, "measure": "0s"}
"""Rates of devices, by which the planner counts: nothing is measured."""


def make_data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(0).normal(size=(2, rows, LENGTH)).astype("float32")
    return x, y


def make_model(
    cut: bool, micro_batch: int | None = None, codec: Any = None, kind: type[keras.Model] = keras.Model
) -> keras.Model:
    """Two layers for sequences of any length, in two stages if `cut`."""
    gpu, npu = (nb.stage(cluster=name) if cut else nullcontext() for name in ("gpu", "npu"))
    with nb.cluster() if cut else nullcontext(), nb.pipeline(micro_batch) if micro_batch else nullcontext():
        inputs = keras.Input((None,))
        with gpu, nb.compress(codec) if codec else nullcontext():
            hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Reshape((-1, 1))(inputs))
        with npu:
            outputs = keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden))
    return kind(inputs, outputs, name="of_any_length")


class StepRecorder(keras.callbacks.Callback):
    """Keeps loss and report of each step, and counts traces."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, float, int]] = []
        self.notes: list[str] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        report = nb.last_report()
        link = report.links["gpu->npu"]
        self.steps.append((report.micro_batches, round(link.raw_bytes / link.payload_bytes, 1), link.raw_bytes))
        self.notes += report.notes


def train(curriculum: Curriculum, cut: bool, **model: Any) -> tuple[Any, StepRecorder, list[Any]]:
    keras.utils.set_random_seed(1)
    traced: list[Any] = []

    def loss(y: Any, found: Any) -> Any:
        traced.append(tuple(y.shape))
        return tf.reduce_mean((y - found) ** 2, axis=-1)

    trained, recorder = make_model(cut, **model), StepRecorder()
    trained.compile(keras.optimizers.SGD(0.1), loss)
    data = tf.data.Dataset.from_tensor_slices(make_data(16)).batch(4)
    callbacks = [curriculum, recorder] if cut else [curriculum]
    history = trained.fit(data, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    return (history, trained.get_weights()), recorder, traced


LENGTHS: dict[str, Any] = {"start": 8, "end": LENGTH, "steps": 6, "step": 8}


def test_fit_applies_options_by_length() -> None:
    """The numbers are those of plain Keras with the same batches; there is at most one trace for each length."""
    tables = {"micro_batch": {8: 1, 16: 4}, "compress": {16: "none", 24: nb.compress(fp16=True, backward="fp16")}}
    curriculum = Curriculum(**LENGTHS, **tables)
    found, recorder, traced = train(curriculum, cut=True, micro_batch=2, codec="bf16")
    expected, _, _ = train(Curriculum(**LENGTHS), cut=False)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-3)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
    shares = {8: (1, 2.0), 16: (4, 1.0), 24: (4, 2.0), 32: (4, 2.0)}
    assert [step[:2] for step in recorder.steps] == [shares[curriculum.length(step)] for step in range(8)]
    assert traced[1:] == [(None, 8), (None, 16), (None, 24), (None, None)]  # the first one makes variables
    assert any("sets, for sequences of 24, 32, 4 micro-batches and codec fp16" in note for note in recorder.notes)
    before = len(recorder.steps)
    # Without a curriculum scopes say all.
    recorder.model.fit(*make_data(4), batch_size=4, verbose=0, callbacks=[recorder])
    assert [step[:2] for step in recorder.steps[before:]] == [(2, 2.0)]


def test_use_options_applies_to_plans_and_loops() -> None:
    curriculum = Curriculum(**LENGTHS, micro_batch=lambda length: length // 8, compress={16: "int8"})
    model, batch = make_model(True, micro_batch=2), make_data(8)
    model.compile("sgd", "mse")
    plans = []
    for step in (0, 6):
        with curriculum.use_options(step):
            plans.append(nb.plan(model, *curriculum.cut(batch, step)))
    assert [plan.micro_batch for plan in plans] == [1, 4]
    assert [plan.boundaries[0].codec for plan in plans] == ["none", "int8"]
    said = "sets, for sequences of 32, 4 micro-batches and codec int8"
    assert [any(said in note for note in plan.notes) for plan in plans] == [False, True]

    @nb.function
    def take_step(x: Any) -> Any:
        return tf.reduce_mean(model(x) ** 2)

    counts = []
    for step in (0, 4, 6):
        x = tf.constant(curriculum.cut(batch[0], step))
        with curriculum.use_options(step):
            loss = take_step(x)
        counts.append(nb.last_report().micro_batches)
        np.testing.assert_allclose(loss, tf.reduce_mean(model(x) ** 2), rtol=2e-2)
    assert counts == [1, 3, 4]


class Penalty(keras.layers.Layer):
    """A layer that adds a loss, which each call of the model clears."""

    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(x**2))
        return x


def train_counting_traces(ahead: bool, links: str | None, middle: Any, fails: bool = False) -> tuple[Any, list[Any]]:
    """The losses and the weights of a `fit`, and the threads and the lengths of its traces."""
    nb.shutdown()
    keras.utils.set_random_seed(1)
    traces: list[Any] = []

    def loss(y: Any, found: Any) -> Any:
        traces.append((threading.current_thread() is threading.main_thread(), y.shape[1]))
        if fails and not traces[-1][0]:
            raise ValueError("in the background")
        return tf.reduce_mean((y - found) ** 2, axis=-1)

    with nb.init(links=links, seed=1), nb.cluster():
        inputs = keras.Input((None,))
        with nb.stage(cluster="gpu"):
            hidden = middle()(keras.layers.Dense(4)(keras.layers.Reshape((-1, 1))(inputs)))
        with nb.stage(cluster="npu"):
            model = keras.Model(inputs, keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden)))
        model.compile("adam", loss)
        curriculum = Curriculum(8, 24, 2, pace={0: 8, 1: 16, 2: 24}, compress={16: "none"}, ahead=ahead)
        fitted = model.fit(*(each[:, :24] for each in make_data(16)), batch_size=4, verbose=0, callbacks=[curriculum])
        return (fitted.history["loss"], [each.tobytes() for each in model.get_weights()]), traces


DROPOUT = functools.partial(keras.layers.Dropout, 0.25)
AHEAD = {
    "over a link": ("1gbit,0ms", DROPOUT, False),
    "in one function": (None, DROPOUT, False),
    "a trace that fails": (None, DROPOUT, True),
    "added losses": (None, Penalty, False),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "over a link" else pytest.mark.grid) for kind in AHEAD]
)
def test_next_length_is_traced_ahead_with_the_same_numbers(kind: str) -> None:
    """As many traces of the same lengths, and the same bits, as without traces ahead."""
    links, middle, fails = AHEAD[kind]
    found, traces = train_counting_traces(True, links, middle, fails)
    expected, others = train_counting_traces(False, links, middle)
    assert found == expected
    assert all(is_main for is_main, _ in others)
    assert [length for is_main, length in traces if is_main or not fails] == [length for _, length in others]
    ahead = [length for is_main, length in traces if not is_main]
    assert ahead == ([] if middle is Penalty else [16, None])


def test_loop_options_are_chosen_and_traced_ahead() -> None:
    """Losses are those of the uncut loop, the planner chooses micro-batches, and the next length is traced ahead."""

    def train(cut: bool) -> tuple[list[float], list[Any], list[int]]:
        nb.shutdown()
        first, second = tf.Variable(tf.ones((1, 8)) / 4), tf.Variable(tf.ones((8, 1)) / 4)
        traces: list[Any] = []

        def take_step(x: Any, y: Any) -> Any:
            traces.append((threading.current_thread() is threading.main_thread(), x.shape[1]))
            with nb.cluster() if cut else nullcontext(), tf.GradientTape() as tape:
                with nb.stage(cluster="gpu") if cut else nullcontext():
                    hidden = tf.tanh(x[..., tf.newaxis] @ first)
                with nb.stage(cluster="npu") if cut else nullcontext():
                    loss = tf.reduce_mean((y - (hidden @ second)[..., 0]) ** 2)
            for weight, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        step = nb.function(take_step) if cut else take_step
        curriculum = Curriculum(8, 16, 2, micro_batch="auto")
        batch = [each[:, :16] for each in make_data(8)]
        losses, counts = [], []
        with nb.init(CLUSTERS, links="2mbit,5ms") if cut else nullcontext():
            for number in range(4):
                with curriculum.use_options(number):
                    losses.append(float(step(*map(tf.constant, curriculum.cut(batch, number)))))
                counts.append(nb.last_report().micro_batches if cut else 1)
        return losses, traces, counts

    losses, traces, counts = train(True)
    np.testing.assert_allclose(losses, train(False)[0], rtol=1e-5)
    assert traces == [(True, None), (True, 8), (False, 16)]
    assert min(counts) > 1


def fit_model(curriculum: Curriculum, cut: bool = True, model: keras.Model | None = None) -> keras.Model:
    model = model or make_model(cut)
    model.compile("sgd", "mse")
    model.fit(*make_data(4), batch_size=4, verbose=0, callbacks=[curriculum])
    return model


def plan_step(curriculum: Curriculum) -> None:
    model = make_model(True)
    model.compile("sgd", "mse")
    with curriculum.use_options(0):
        nb.plan(model, *curriculum.cut(make_data(4), 0))


def fit_copies(curriculum: Curriculum, **how: Any) -> None:
    """A `fit` with a curriculum, of a model of which each cluster trains a copy."""
    nb.shutdown()
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}):
        with nb.cluster(), nb.replica(**how), nb.stage():
            inputs = keras.Input((None,))
            hidden = keras.layers.Dense(1)(keras.layers.Reshape((-1, 1))(inputs))
            model = keras.Model(inputs, keras.layers.Reshape((-1,))(hidden))
        model.compile(OneBitAdam(0.1, freeze_step=9) if "exchange" in how else "sgd", "mse")
        model.fit(*make_data(4), batch_size=4, verbose=0, callbacks=[curriculum])


def make_learned_basis_model() -> keras.Model:
    with nb.cluster():
        inputs = keras.Input((None,))
        with nb.stage(cluster="gpu"), nb.compress(rank=2, basis="learned"):
            hidden = keras.layers.Dense(8)(keras.layers.Reshape((-1, 1))(inputs))
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden))
    return keras.Model(inputs, outputs)


class TwiceTrained(keras.Model):
    """A step that asks for gradients twice."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def make_split_model() -> keras.Model:
    with nb.cluster():
        inputs = keras.Input((None,))
        with nb.stage(cluster="gpu"), nb.split(2):
            hidden = keras.layers.Dense(8)(keras.layers.Reshape((-1, 1))(inputs))
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden))
    return keras.Model(inputs, outputs)


AUTO: dict[str, Any] = {**LENGTHS, "micro_batch": "auto", "compress": "auto"}


@pytest.mark.parametrize(
    ("run", "kind", "said"),
    [
        (lambda: Curriculum(**LENGTHS, micro_batch=4), OptionError, "micro_batch=4 of a curriculum is not a table"),
        (lambda: Curriculum(**LENGTHS, compress="int8"), OptionError, "compress='int8' of a curriculum is not a table"),
        (
            lambda: Curriculum(**LENGTHS, micro_batch={}),
            OptionError,
            r"micro_batch=\{\} of a curriculum is not a table",
        ),
        (lambda: Curriculum(**LENGTHS, micro_batch={20: 2}), OptionError, "has the length 20, which never occurs"),
        (lambda: Curriculum(**LENGTHS, micro_batch={8: 0}), OptionError, "micro_batch= of a curriculum contains 0"),
        (
            lambda: Curriculum(**LENGTHS, micro_batch={8: True}),
            OptionError,
            "micro_batch= of a curriculum contains True",
        ),
        (lambda: Curriculum(**LENGTHS, compress={8: "int9"}), OptionError, "'int9'"),
        (lambda: Curriculum(**LENGTHS, compress={8: "auto"}), OptionError, 'contains "auto" for some lengths'),
        (lambda: Curriculum(**LENGTHS, compress={8: nb.stage()}), OptionError, r"contains nb.stage\(\)"),
        (
            lambda: Curriculum(**LENGTHS, compress={8: nb.compress(rank=2, basis="learned")}),
            OptionError,
            "whose basis is learned",
        ),
        (
            lambda: plan_step(Curriculum(**LENGTHS, micro_batch="auto")),
            NotYetError,
            'a plan by a curriculum with "auto" before its first step',
        ),
        (lambda: fit_model(Curriculum(**AUTO), model=make_split_model()), NotYetError, "the step has nb.split"),
        (lambda: fit_copies(Curriculum(**AUTO), sync_every=2), NotYetError, r"micro_batch={64: 2, 256: 4}\)$"),
        (
            lambda: fit_model(Curriculum(**AUTO), model=make_model(True, kind=TwiceTrained)),
            NotYetError,
            "the step does not ask for gradients exactly once",
        ),
        (lambda: fit_model(Curriculum(**LENGTHS, micro_batch={32: 5})), OptionError, "is 5 for sequences of 32"),
        (
            lambda: fit_model(Curriculum(**LENGTHS, micro_batch={8: 2}), cut=False),
            OptionError,
            "have no effect on model",
        ),
        *(
            (
                functools.partial(fit_copies, Curriculum(**LENGTHS, compress={length: "int8"}), **how),
                OptionError,
                "compress= of a curriculum has no effect on the step",
            )
            for length, how in ((8, {"sync_every": 2}), (32, {"sync_every": 2}), (8, {"exchange": "1bit"}))
        ),
        (
            lambda: fit_model(Curriculum(**LENGTHS, compress={8: "int8"}), model=make_learned_basis_model()),
            OptionError,
            "nb.compress here has a basis that is learned",
        ),
    ],
)
def test_invalid_length_options_are_refused(run: Any, kind: type[NebulaError], said: str) -> None:
    with pytest.raises(kind, match=said):
        run()


def train_with_planned_options(folder: str, line: str, stop: int = -1) -> tuple[Any, list[Any]]:
    """The losses, and the number of micro-batches and the codec of each step, both chosen by the planner."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    seen: list[Any] = []

    def record_step(batch: int, logs: Any) -> None:
        with contextlib.suppress(StateError):  # the first steps of a run that is resumed were done before
            report = nb.last_report()
            seen.append((report.micro_batches, *{each.codec for each in report.boundaries.values()}))
        if len(seen) == stop:
            raise KeyboardInterrupt

    with nb.init(CLUSTERS, links=line, seed=1, checkpoint={"folder": folder, "every": 1}):
        model = make_model(True)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices(make_data(32)).batch(8)
        curriculum = Curriculum(**LENGTHS, micro_batch="auto", compress="auto")
        callbacks = [curriculum, keras.callbacks.LambdaCallback(on_train_batch_end=record_step)]
        try:
            return model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history["loss"], seen
        except KeyboardInterrupt:
            return [], seen


def test_resumed_run_keeps_the_planned_options_by_length(tmp_path: Any) -> None:
    losses, seen = train_with_planned_options(str(tmp_path / "whole"), "2mbit,5ms")
    assert len(set(seen)) > 1 and [count for count, _ in seen] == sorted(count for count, _ in seen)
    assert seen[-1][0] > 1 and seen[-1][1] == "int4"
    train_with_planned_options(str(tmp_path / "broken"), "2mbit,5ms", stop=3)
    # For which nothing would be compressed.
    resumed_losses, resumed_steps = train_with_planned_options(str(tmp_path / "broken"), "100gbit,0ms")
    assert (resumed_losses, resumed_steps) == (losses, seen[-len(resumed_steps) :])


@pytest.mark.grid
def test_auto_parallel_plans_each_length_separately() -> None:
    """Where long sequences do not fit into the memory of a worker, the step is cut when they begin."""
    x, y = np.random.default_rng(0).normal(size=(2, 48, 128)).astype("float32")
    reports: list[Any] = []

    def train_planned(planned: bool) -> Any:
        nb.shutdown()
        keras.utils.set_random_seed(1)
        if planned:
            nb.init({**CLUSTERS, "clusters": {"gpu": {"flops": "100G"}, "npu": {}}}, links="100mbit,1ms")
            nb.auto_parallel(memory="2MiB")
        hidden = inputs = keras.Input((None,))
        hidden = keras.layers.Reshape((-1, 1))(hidden)
        for _ in range(2):
            hidden = keras.layers.Dense(128, activation="tanh")(hidden)
        model = keras.Model(inputs, keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden)))
        model.compile("adam", "mse")
        table = {0: 8, 2: 128}
        curriculum = Curriculum(8, 128, 2, pace=table, micro_batch="auto" if planned else None)
        callbacks = [curriculum]
        if planned:
            recorder = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda *_, **__: reports.append(nb.last_report())
            )
            callbacks.append(recorder)
        validation = {"validation_data": (x[:4], y[:4]), "validation_batch_size": 4}
        return model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=callbacks, **validation).history

    history = train_planned(True)
    for name, values in train_planned(False).items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    assert [len(report.stages) > 1 or report.micro_batches > 1 for report in reports] == [False] * 2 + [True] * 4
    assert any("lets nb.auto_parallel plan for sequences of 128" in note for note in reports[-1].notes)
