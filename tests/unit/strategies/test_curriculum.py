"""A curriculum by length: the pace, the batches, and a training whose steps grow with it."""

from __future__ import annotations

import contextlib
import itertools
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import whale_nebula as nb
from whale_nebula.errors import DataError, NebulaError, OptionError
from whale_nebula.strategies import ByTokens, Curriculum

ROWS, LENGTH = 8, 64
TEXT = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)


@given(st.integers(1, 70), st.integers(0, 90), st.integers(1, 200), st.integers(1, 16), st.sampled_from([1, 2]))
def test_curriculum_lengths_match_the_formula(start: int, more: int, steps: int, step: int, root: int) -> None:
    """start + (end - start) (t / T)^(1 / r), rounded down to multiples, but never below the start."""
    end = start + more
    found = Curriculum(start, end, steps, step=step, pace={1: "linear", 2: "root"}[root])
    for t in (*range(steps + 1), 2 * steps, 10**9):
        length = found.length(t)
        if t >= steps:
            assert length == end
            continue
        # the longest multiple L with (L - start)^r T <= t (end - start)^r, in whole numbers
        reached = [n for n in range(start, end + 1) if (n - start) ** root * steps <= t * more**root]
        assert length == max(start, max(reached) // step * step)
    assert found.lengths == sorted(set(found.lengths))


@pytest.mark.parametrize(
    "known", [pytest.param(True, marks=pytest.mark.grid), False], ids=["of known size", "of unknown size"]
)
def test_dataset_passes_continue_the_curriculum(known: bool) -> None:
    """Also where somebody looks at the first batches in between, as Keras does to build a model."""
    mask = np.ones((ROWS, LENGTH, LENGTH), bool)
    batches = ({"text": TEXT, "mask": mask}, TEXT[:, 0])
    found = Curriculum(16, LENGTH, 10)
    data = tf.data.Dataset.from_tensor_slices(batches)
    data = (data if known else data.filter(lambda *_: True)).batch(2).apply(found)
    assert data.cardinality() == (ROWS // 2 if known else tf.data.UNKNOWN_CARDINALITY)
    seen = []
    for _ in range(3):
        next(iter(data))
        for features, label in itertools.islice(data, ROWS // 2) if known else data:  # asks for no batch more
            length = features["text"].shape[1]
            seen.append(length)
            assert features["mask"].shape == (2, length, length) and label.shape == (2,)
            np.testing.assert_array_equal(features["text"], TEXT[label.numpy() // LENGTH, :length])
    assert seen == [found.length(step) for step in range(12)]
    (later,) = tf.data.Dataset.from_tensors(TEXT).apply(lambda each: found(each, first=7))
    np.testing.assert_array_equal(later, found.cut(TEXT, 7))
    endless = iter(tf.data.Dataset.from_tensors((TEXT, TEXT)).repeat().apply(found))
    assert [next(endless)[1].shape[1] for _ in range(11)] == [found.length(step) for step in range(11)]


def test_pack_mode_keeps_all_tokens() -> None:
    found = Curriculum(16, LENGTH, 2, step=24, pace={0: 16, 1: 24, 2: LENGTH}, mode="pack")
    data = tf.data.Dataset.from_tensors((TEXT, TEXT + 1)).repeat(3).apply(found)
    shapes = [(16, ROWS * 4), (24, ROWS * 2), (LENGTH, ROWS)]
    for step, ((x, y), (length, rows)) in enumerate(zip(data, shapes, strict=True)):
        assert x.shape == (rows, length)
        np.testing.assert_array_equal(x, TEXT[:, : LENGTH // length * length].reshape(rows, length))
        np.testing.assert_array_equal(y, x + 1)
        np.testing.assert_array_equal(found.cut(TEXT, step), x)


def make_dataset(*shapes: tuple[int, ...]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(tuple(tf.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: Curriculum(0, 8, 9), OptionError, "start=0 of a curriculum"),
        (lambda: Curriculum(8, 16, True), OptionError, "steps=True of a curriculum"),
        (lambda: Curriculum(16, 8, 9), OptionError, "a curriculum from length 16 to 8"),
        (lambda: Curriculum(8, 16, 9, pace="fast"), OptionError, "pace='fast' of a curriculum"),
        (lambda: Curriculum(8, 16, 9, pace=["linear"]), OptionError, r"pace=\['linear'\] of a curriculum"),
        (lambda: Curriculum(8, 16, 9)(make_dataset((4, 16)), first=-1), OptionError, "first=-1 of a curriculum"),
        (lambda: ByTokens(0.1, Curriculum(8, 16, 9)), OptionError, "schedule, not 0.1"),
        (lambda: ByTokens(keras.optimizers.schedules.CosineDecay(1.0, 9), 5), OptionError, "a Curriculum, not 5"),
        (lambda: Curriculum(8, 16, 9, mode="cut"), OptionError, "mode='cut' of a curriculum"),
        (lambda: Curriculum(8, 16, 9, pace={}), OptionError, r"pace=\{\} is not a table from 8 to 16 in 9 steps"),
        (lambda: Curriculum(8, 16, 9, pace={0: 8, 5: 7, 9: 16}), OptionError, "is not a table from 8 to 16"),
        (lambda: Curriculum(8, 16, 9, pace={0: 8, 8: 16}), OptionError, "is not a table from 8 to 16 in 9 steps"),
        (
            lambda: Curriculum(8, 16, 9)(make_dataset((4, 12))),
            DataError,
            r"no tensor of a batch has an axis of 16: \(4, 12\)",
        ),
        (
            lambda: Curriculum(8, 16, 9).cut((np.zeros((4, 12)), np.zeros(4)), 0),
            DataError,
            r"no tensor of a batch has an axis of 16: \(4, 12\), \(4,\)",
        ),
        (lambda: Curriculum(8, 16, 9)(np.zeros((4, 16))), DataError, "requires a dataset, not ndarray"),
        (
            lambda: Curriculum(8, 16, 9, mode="pack")(make_dataset((4, 16), (4,))),
            DataError,
            r"a batch of \(4, 16\), \(4,\) cannot be packed",
        ),
        (
            lambda: Curriculum(8, 16, 9, mode="pack")(make_dataset((4, 16, 16))),
            DataError,
            r"a batch of \(4, 16, 16\) cannot be packed",
        ),
    ],
)
def test_invalid_curriculum_is_refused(make: Any, kind: type[NebulaError], said: str) -> None:
    with pytest.raises(kind, match=said):
        make()


def make_text(rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    start, stride = draw.integers(0, 32, (rows, 1)), draw.integers(1, 9, (rows, 1))
    tokens = (start + stride * np.arange(LENGTH + 1)) % 32
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


@pytest.mark.parametrize("mode", ["truncate", pytest.param("pack", marks=pytest.mark.grid)])
def test_cut_model_trains_with_a_curriculum_like_the_uncut_one(mode: str) -> None:
    """Bytes fall with the length, the rate is that of as many tokens, and all lengths but the first share a trace."""
    curriculum = Curriculum(16, LENGTH, 6, step=16, mode=mode)
    seen: list[tuple[int, int]] = []
    traced: list[Any] = []

    def loss(y: Any, logits: Any) -> Any:
        traced.append(y)
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)

    def record_step(batch: int, logs: Any) -> None:
        seen.append((len(traced), nb.last_report().links["gpu->npu"].bytes))

    def train(cut: bool) -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((None,), dtype="int32")
        with nb.pipeline(micro_batch=2) if cut else contextlib.nullcontext():
            with nb.stage(cluster="gpu") if cut else contextlib.nullcontext():
                hidden = keras.layers.Dense(64, activation="tanh")(keras.layers.Embedding(32, 16)(inputs))
            with nb.stage(cluster="npu") if cut else contextlib.nullcontext():
                model = keras.Model(inputs, keras.layers.Dense(32)(hidden))
        rate = ByTokens(keras.optimizers.schedules.CosineDecay(3e-2, 8), curriculum)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, run_eagerly=not cut)
        data = tf.data.Dataset.from_tensor_slices(make_text(16)).batch(4).apply(curriculum)
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=record_step)] if cut else []
        return model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history["loss"], model.get_weights()

    history, weights = train(cut=True)
    expected, others = train(cut=False)
    np.testing.assert_allclose(history, expected, rtol=1e-5)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    tokens = [curriculum.cut(make_text(4)[0], step).size for step in range(8)]
    shares = [each / seen[-1][1] for _, each in seen]
    np.testing.assert_allclose(shares, [each / tokens[-1] for each in tokens], rtol=0.03)
    second = next(step for step in range(8) if curriculum.length(step) > 16)
    assert len({count for count, _ in seen}) == 2 and seen[second][0] == seen[-1][0]


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_curriculum_callback_equals_a_curriculum_dataset(cut: bool) -> None:
    """Arrays and datasets, over several fits, as a dataset that it was applied to; validation has full rows."""
    x, y = np.random.default_rng(0).normal(size=(2, 20, 16)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    def train(as_callback: bool) -> Any:
        keras.utils.set_random_seed(1)
        gpu, npu = (nb.stage(cluster=name) if cut else nullcontext() for name in ("gpu", "npu"))
        with nb.cluster() if cut else nullcontext():
            inputs = keras.Input((None,))
            with gpu:
                hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Reshape((-1, 1))(inputs))
            with npu:
                model = keras.Model(inputs, keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden)))
        model.compile("sgd", "mse")
        curriculum = Curriculum(4, 16, 18, step=4)
        callbacks, applied = [curriculum] * as_callback, batches if as_callback else batches.apply(curriculum)
        history = []
        for data in ((applied, None), (x, y) if as_callback else (applied, None)):
            fit_options = {"validation_data": (x, y), "validation_batch_size": 4, "callbacks": callbacks}
            batch_size = 4 if data[1] is not None else None
            fitted = model.fit(*data, batch_size, epochs=2, verbose=0, shuffle=False, **fit_options)
            history += [*fitted.history["loss"], *fitted.history["val_loss"]]
        return history

    assert train(as_callback=True) == train(as_callback=False)


def test_prebuilt_callback_list_is_refused() -> None:
    model = keras.Sequential([keras.Input((None,)), keras.layers.Reshape((-1,))])
    model.compile(loss="mse")
    callbacks = keras.callbacks.CallbackList([Curriculum(4, 16, 9)], model=model)
    with pytest.raises(OptionError, match=r"found no data of model\.fit"):
        model.fit(np.ones((4, 16)), np.ones((4, 16)), callbacks=callbacks, verbose=0)


@pytest.mark.grid
def test_custom_loop_scopes_follow_the_length() -> None:
    """An `nb.function` is traced once for each length, and its scopes are met in each trace."""
    curriculum, x = Curriculum(16, 64, 4, step=16), np.random.default_rng(0).normal(size=(8, 64)).astype("float32")

    def train(cut: bool) -> Any:
        first, second = tf.Variable(tf.ones((1, 8)) / 4), tf.Variable(tf.ones((8, 2)) / 4)

        def enter(scope: Any, **options: Any) -> Any:
            return scope(**options) if cut else nullcontext()

        def step(x: Any) -> Any:
            short = x.shape[1] < 48
            codec_scope = nullcontext() if short else enter(nb.compress, fp16=True, backward="fp16")
            with (
                enter(nb.cluster),
                enter(nb.pipeline, micro_batch=1 if short else 4),
                codec_scope,
                tf.GradientTape() as tape,
            ):
                with enter(nb.stage, cluster="gpu"):
                    hidden = tf.tanh(x[..., tf.newaxis] @ first)
                with enter(nb.stage, cluster="npu"):
                    loss = tf.reduce_mean((hidden @ second - 1.0) ** 2)
            for weight, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
                weight.assign_sub(0.5 * gradient)
            return loss

        take_step, found, reports = nb.function(step) if cut else step, [], []
        for number in range(6):
            found.append(float(take_step(tf.constant(curriculum.cut(x, number)))))
            reports.append(nb.last_report() if cut else None)
        return found, reports

    found, reports = train(cut=True)
    np.testing.assert_allclose(found, train(cut=False)[0], rtol=1e-3)
    assert [report.micro_batches for report in reports] == [1, 1, 1, 4, 4, 4]
    sent = [report.links["gpu->npu"].raw_bytes / report.links["gpu->npu"].payload_bytes for report in reports]
    np.testing.assert_allclose(sent, [1, 1, 1, 2, 2, 2], rtol=0.01)


def test_by_tokens_schedule_is_restored_from_config() -> None:
    for pace in ("root", {0: 8, 30: 24, 100: 64}):
        schedule = ByTokens(keras.optimizers.schedules.CosineDecay(1.0, 100), Curriculum(8, 64, 100, pace=pace))
        optimizer = keras.optimizers.Adam(schedule)
        restored = keras.optimizers.Adam.from_config(
            optimizer.get_config(), custom_objects={"ByTokens": ByTokens}
        )._learning_rate
        tokens = 0
        for step in range(120):
            if step % 9 == 0:
                expected = schedule.schedule(tokens / 64)
                assert float(schedule(step)) == float(restored(step)) == pytest.approx(float(expected), abs=1e-6)
            tokens += schedule.curriculum.length(step)
