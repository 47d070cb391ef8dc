"""Steps with compressed boundaries in one process: training, equality of schedules, and predicted bytes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity.codec_step import CODECS, LENGTH, ROWS, WIDTH, StepResults, draw_batch, train_with_codec
from tests.parity_harness import data
from whale_nebula.codec import FP16, INT4, SVD

THERE, BACK = "b0 gpu->npu", "b0 npu->gpu"
SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "eager-1f1b")
GRID_CODECS = ("fp16", "bf16", "int8", "svd", "svd alone", "rank", "rank alone")  # what they are made of, others have
BOUNDED = ("bf16", "mask", "mask and rank")  # values decide how many bytes there are, at most


def train_in_new_run(options: dict[str, Any], **how: Any) -> StepResults:
    """What training leaves, in a run of its own."""
    with nb.init(links="10gbit,0ms"):
        return train_with_codec(options, **how)


def train_by_name(name: str, micro_batches: int = 3, schedule: str = "eager-1f1b") -> StepResults:
    """The same, by a codec's name; once for all tests that ask, however they write it."""
    return train_cached(name, micro_batches, schedule)


@functools.cache
def train_cached(name: str, micro_batches: int, schedule: str) -> StepResults:
    return train_in_new_run(
        CODECS[name], micro_batches=micro_batches, schedule=schedule, plan=schedule == SCHEDULES[-1]
    )


def relative_error(found: np.ndarray, plain: np.ndarray) -> float:
    return float(np.linalg.norm(found - plain) / np.linalg.norm(plain))


def are_equal(one: StepResults, other: StepResults) -> bool:
    return one.losses == other.losses and all(map(np.array_equal, one.weights, other.weights))


def make_case(*case: Any) -> Any:
    """A case whose codec comes first."""
    return pytest.param(*case, marks=[pytest.mark.grid] if case[0] in GRID_CODECS else [])


# ---------------------------------------------------------------------- every codec
@pytest.mark.parametrize("name", [make_case(name) for name in CODECS])
def test_compressed_training_stays_near_uncompressed(name: str) -> None:
    """The loss falls as it does uncompressed, and the matrices are near those: how near, the codec decides."""
    found, plain = train_by_name(name), train_by_name("none")
    assert np.isfinite(found.losses).all()
    assert found.losses == pytest.approx(plain.losses, rel=0.5)
    far = max(relative_error(a, b) for a, b in zip(found.weights, plain.weights, strict=True) if b.ndim == 2)
    assert far <= {"none": 0.0, "fp16": 1e-4, "bf16": 1e-3, "int8": 1e-3, "mask": 1e-6}.get(name, 0.1)
    assert far > 0.0 or name in ("none", "mask")


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [*(make_case(name, 3) for name in CODECS if name != "ramp"), pytest.param("topk", 1, marks=pytest.mark.grid)],
)
def test_step_sends_the_planned_bytes(name: str, micro_batches: int) -> None:
    """Those of the last step: a basis has been sent by then, and what starts later has started."""
    found = train_by_name(name, micro_batches)
    assert found.plan is not None
    for link in ("gpu->npu", "npu->gpu"):
        planned_link, sent = found.plan.links[link], found.links[-1][link]
        assert sent.payload_bytes <= planned_link.bytes and sent.bytes <= planned_link.wire_bytes
        if name not in BOUNDED:
            assert sent.payload_bytes == pytest.approx(planned_link.bytes, rel=0.01)
            assert sent.bytes == pytest.approx(planned_link.wire_bytes, rel=0.01)


SAMPLE = [("mask and rank", "gpipe", 3)]


@pytest.mark.parametrize(
    ("name", "schedule", "micro_batches"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.grid)
        for case in itertools.product(CODECS, SCHEDULES, (1, 2, 3))
    ],
)
def test_weights_do_not_depend_on_the_schedule(name: str, schedule: str, micro_batches: int) -> None:
    assert are_equal(train_by_name(name, micro_batches, schedule), train_by_name(name, micro_batches))


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        make_case("int8", "int8", "int8"),
        ("int4", "int4", "int4"),
        make_case("svd", "svd(0.5) >> fp16", "int8"),
        make_case("svd alone", "svd(0.5)", "svd(0.5) >> int8"),
        make_case("rank", "rank(8) >> int8", "rank(8) >> int8"),
        make_case("rank alone", "rank(8)", "rank(8)"),
        ("topk", "topk(0.25) >> int4", "topk(0.25) >> int8"),
        ("falls back", "int4", "int8"),
    ],
)
def test_report_names_the_codecs_used(name: str, there: str, back: str) -> None:
    assert train_by_name(name).codecs == [{THERE: there, BACK: back}] * 3


def test_codec_that_would_not_shrink_is_replaced_and_noted_in_the_plan() -> None:
    plan, why = train_by_name("falls back").plan, "would not make it smaller"
    assert plan is not None
    assert f"b0 [3, {LENGTH}, {WIDTH}] crosses as int4: topk(0.9) >> int4 {why}" in plan.notes
    assert f"b0 gradient [3, {LENGTH}, {WIDTH}] crosses as int8: topk(0.9) >> int8 {why}" in plan.notes


# ---------------------------------------------------------------------- what changes in the middle of a run
def test_start_step_applies_to_both_directions() -> None:
    assert train_by_name("late").codecs == [{THERE: "none", BACK: "none"}] * 2 + [{THERE: "int4", BACK: "int8"}]
    assert are_equal(train_in_new_run(CODECS["late"], steps=2), train_in_new_run({}, steps=2))


@pytest.mark.grid
def test_ramp_advances_every_ten_steps_within_its_error_bound() -> None:
    found = train_in_new_run({"int4": True, "ramp": 0.03}, steps=12).codecs
    assert [each[THERE] for each in found] == ["int8"] * 12  # int8 loses 0.01, int4 would lose 0.1
    found = train_in_new_run({"int4": True, "backward": "int4", "ramp": 0.5}, steps=12).codecs
    assert [each[THERE] for each in found] == [each[BACK] for each in found] == ["int8"] * 10 + ["int4"] * 2


@pytest.mark.grid
def test_models_of_one_run_have_separate_states() -> None:
    """Of the same sizes and stages: what starts at a step starts at each one's own."""
    first, second = train_with_codec(CODECS["late"]), train_with_codec(CODECS["late"])
    assert first.codecs == second.codecs
    assert are_equal(first, second)


# ---------------------------------------------------------------------- steps without a gradient
def make_model(options: dict[str, Any]) -> tuple[keras.Model, keras.layers.Layer, keras.layers.Layer]:
    keras.utils.set_random_seed(16)
    first, second = keras.layers.Dense(WIDTH, activation="tanh"), keras.layers.Dense(3)
    inputs = keras.Input((12,))
    with nb.cluster(), nb.pipeline(2), nb.compress(**options):
        with nb.stage(cluster="gpu"):
            hidden = first(inputs)
        with nb.stage(cluster="npu"):
            model = keras.Model(inputs, second(hidden))
    model.compile("sgd", "mse")
    return model, first, second


@pytest.mark.parametrize(
    ("options", "used"),
    [({}, "int4"), ({"forward": "none"}, None), ({"forward": SVD(0.5) >> FP16()}, "svd(0.5) >> fp16")],
    ids=str,
)
def test_predict_uses_the_training_codec_or_forward_option(options: dict[str, Any], used: str | None) -> None:
    model, first, second = make_model({"int4": True, **options})
    x = draw_batch(0)[0].reshape(-1, 12)[:20]
    hidden = first(x)
    if used == "int4":
        hidden = INT4().decode(INT4().encode(hidden), hidden.shape, "float32")
    expected, found = second(hidden).numpy(), model.predict(x, batch_size=20, verbose=0)
    if used in ("int4", None):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert not np.allclose(found, expected, rtol=1e-3)
        assert nb.last_report().boundaries[THERE].codec == used


@pytest.mark.grid
def test_evaluate_uses_the_training_codec() -> None:
    model, first, second = make_model({"int4": True})
    x, y = draw_batch(0)[0].reshape(-1, 12)[:20], draw_batch(0)[1].reshape(-1, 3)[:20]
    model.fit(x, y, batch_size=10, epochs=1, verbose=0)
    hidden = first(x)
    hidden = INT4().decode(INT4().encode(hidden), hidden.shape, "float32")
    expected = float(tf.reduce_mean(tf.square(second(hidden) - y)))
    assert model.evaluate(x, y, batch_size=20, verbose=0) == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------- padding
def test_masked_rows_are_not_sent_and_training_is_exact() -> None:
    """Exact: what is left out counts for nothing, and the rest crosses as it is."""
    found, plain = train_by_name("mask"), train_by_name("none")
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    for a, b in zip(found.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    left_out = 4 * WIDTH * (ROWS * LENGTH - int(draw_batch(2)[2].sum()))
    heads = {"npu->gpu": 3 * 4, "gpu->npu": sum(4 + -(-rows * LENGTH // 8) for rows in (3, 2, 2))}
    for link, head_bytes in heads.items():
        assert found.links[-1][link].payload_bytes == plain.links[-1][link].payload_bytes - left_out + head_bytes


def test_mask_input_missing_in_predictions_is_ignored() -> None:
    @nb.function
    def predict(x: Any) -> Any:
        with nb.cluster(), nb.compress(mask="weights"):
            with nb.stage(cluster="gpu"):
                hidden = tf.tanh(x)
            with nb.stage(cluster="npu"):
                return hidden * 2.0

    x = data(3, 4)
    np.testing.assert_allclose(predict(x), 2.0 * np.tanh(x), rtol=1e-6)


def train_with_keras_mask(compressed: bool) -> tuple[list[np.ndarray], int]:
    """A model whose mask Keras finds: trained for two steps, and what the last of them sent."""
    keras.utils.set_random_seed(17)
    inputs = keras.Input((LENGTH,), dtype="int32")
    scope = nb.compress(mask=True, backward=None) if compressed else contextlib.nullcontext()
    with nb.cluster(), nb.pipeline(2):
        with scope, nb.stage(cluster="gpu"):
            hidden = keras.layers.Embedding(30, 8, mask_zero=True)(inputs)
        with nb.stage(cluster="npu"):
            model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(hidden)))
    model.compile("sgd", "mse")
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(1, 30, (20, LENGTH)) * (np.arange(LENGTH) < drawn.integers(1, LENGTH, (20, 1)))
    model.fit(tokens, draw_batch(0)[1].reshape(-1, 3)[:20, :2], batch_size=10, shuffle=False, verbose=0)
    sent = nb.last_report().links["gpu->npu"].payload_bytes
    return [np.array(variable) for variable in model.trainable_variables], sent


def test_padding_masked_by_keras_is_not_sent() -> None:
    nb.init(links="10gbit,0ms")
    (weights, sent), (plain, whole) = train_with_keras_mask(True), train_with_keras_mask(False)
    assert sent < 0.8 * whole
    for a, b in zip(weights, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- several readers
def test_start_step_of_a_tensor_with_two_readers_counts_steps_once() -> None:
    """Each of them gives a share of its gradient: a step counts once for each, and they are rounded apart."""
    weights = [tf.Variable(0.2 * data(16, 16, seed=number)) for number in range(3)]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2), nb.compress(int8=True, start_step=2):
            with nb.stage(cluster="gpu"):
                hidden = tf.tanh(x @ weights[0])
            with nb.stage(cluster="npu", name="one"):
                middle = tf.tanh(hidden @ weights[1])
            with nb.stage(cluster="npu", name="two"):
                loss = tf.reduce_mean(tf.square(middle + hidden @ weights[2]))
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    used = []
    for number in range(4):
        step(data(8, 16, seed=number))
        used.append({each.codec for each in nb.last_report().boundaries.values()})
    assert used == [{"none"}] * 2 + [{"int8"}] * 2


# ---------------------------------------------------------------------- steps that fail
def train_with_failures(*failing: int) -> tuple[list[float], list[str]]:
    """The losses of four steps, and how each crossed; before those that are named, one fails."""
    weights = [tf.Variable(0.2 * data(16, 16, seed=number)) for number in range(2)]

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.compress(rank=4, backward=None, start_step=2):
            with nb.stage(cluster="gpu"):
                hidden = tf.tanh(x @ weights[0])
            with nb.stage(cluster="npu"):
                tf.debugging.assert_less(y, 100.0)
                loss = tf.reduce_mean(tf.square(hidden @ weights[1] - y))
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    losses, used = [], []
    for number in range(4):
        if number in failing:
            with pytest.raises(nb.errors.StageFailedError):
                step(data(8, 16, seed=9), np.full((8, 16), 200.0, "float32"))
        losses.append(float(step(data(8, 16, seed=number), data(8, 16, seed=50 + number))))
        used.append(nb.last_report().boundaries[THERE].codec)
    return losses, used


def test_failed_steps_do_not_count_for_codecs() -> None:
    """What begins with the third step does so after two that succeed."""
    plain = train_with_failures()
    assert plain[1] == ["none", "none", "rank(4)", "rank(4)"]
    assert train_with_failures(1, 3) == plain


# -------------------- Batches with varying lengths of sentences: a free line counts the bytes of an emulated one
LENGTHS = (5, 9, 3, 9)


class LinkRecorder(keras.callbacks.Callback):
    """What each step put on the links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, tuple[int, int]]] = []

    def on_train_batch_end(self, draw_batch: int, logs: object = None) -> None:
        self.links.append({name: (link.bytes, link.frames) for name, link in nb.last_report().links.items()})


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    for length in LENGTHS:
        yield draw.integers(1, 20, (6, length)), draw.standard_normal((6, length, 2)).astype("float32")


def list_link_bytes(links: str | None, micro_batch: int) -> list[dict[str, tuple[int, int]]]:
    """Bytes and frames of each step."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None,), dtype="int32")
    with nb.cluster(), nb.pipeline(micro_batch):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Embedding(20, 8)(inputs)
            turned = keras.layers.Permute((2, 1))(hidden)
        with nb.stage(cluster="npu"):
            again = keras.layers.Permute((2, 1))(turned)
            outputs = keras.layers.Dense(2)(keras.layers.Concatenate()([again, hidden]))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    kept = LinkRecorder()
    with nb.init(links=links):
        model.fit(batches(), steps_per_epoch=len(LENGTHS), verbose=0, callbacks=[kept])
    return kept.links


@pytest.mark.grid
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_bytes_on_a_free_link_are_counted_for_each_length(micro_batch: int) -> None:
    free = list_link_bytes(None, micro_batch)
    assert free == list_link_bytes("10gbit,0ms", micro_batch)
    assert len({step["gpu->npu"] for step in free}) == len(set(LENGTHS))


def test_in_flight_limit_follows_the_measured_round_trip() -> None:
    """No size is planned, so the way of the first micro-batch says how long the line is."""
    keras.utils.set_random_seed(1)
    with nb.cluster(), nb.pipeline(6):
        inputs = keras.Input((None, 4))
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(8)(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with nb.init(links="1gbit,20ms"):
        for length in (5, 9, 3, 9, 7):
            model.train_on_batch(np.ones((6, length, 4)), np.ones((6, length, 1)))
        ran = [span.what.split()[0] for span in nb.last_report().timeline() if span.lane == "gpu"]
    assert ran.index("backward") == 6, ran
