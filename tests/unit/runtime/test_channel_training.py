"""Training across a compressed boundary in one process: reports, and steps that are left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NonFiniteError
from whale_nebula.report.report import Report
from whale_nebula.runtime.step import measured

WIDTH, ROWS = 64, 16
THERE, BACK = "b0 a->b", "b0 b->a"
DRAWN = np.random.default_rng(0)
X, Y = DRAWN.standard_normal((ROWS, 6)).astype("float32"), DRAWN.standard_normal((ROWS, 2)).astype("float32")
WORST = X.copy()
WORST[1, 1] = np.nan


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    with nb.init(seed=1):
        yield


class Lesson:
    """A function of two stages with its weights, its optimizer, and a counter that it counts up before all else."""

    def __init__(self, micro_batches: int = 2, optimizer: Any = None, **options: Any) -> None:
        drawn = np.random.default_rng(1)
        shapes = (6, WIDTH), (WIDTH, 2)
        self.w, self.v = (tf.Variable(drawn.standard_normal(shape).astype("float32")) for shape in shapes)
        self.begun, self.seen = tf.Variable(0), tf.Variable(0.0)
        self.optimizer = optimizer or keras.optimizers.Adam(0.01)
        self.optimizer.build([self.w, self.v])
        self.losses: list[float] = []
        self.reports: list[Report] = []
        self.step = self._step(micro_batches, options)

    def _step(self, micro_batches: int, options: dict[str, Any]) -> Callable[..., Any]:
        @nb.function
        def step(x: Any, y: Any) -> Any:
            self.begun.assign_add(1)
            with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batches), nb.compress(**options):
                with nb.stage(cluster="a"):
                    hidden = tf.tanh(x @ self.w)
                with nb.stage(cluster="b"):
                    loss = tf.reduce_mean((hidden @ self.v - y) ** 2)
                    told = self.optimizer.scale_loss(loss)
            variables = [self.w, self.v]
            gradients = tape.gradient(told, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            self.seen.assign_add(loss)
            return loss

        return step

    def run(self, *batches: Any) -> None:
        for x in batches:
            self.losses.append(float(self.step(x, Y)))
            self.reports.append(nb.last_report())

    def state(self) -> list[np.ndarray]:
        own = [self.w, self.v, self.begun, self.seen]
        return [np.asarray(variable) for variable in (*own, *self.optimizer.variables)]


def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


# --------------------------------------------------------------------------------------- told
def test_a_report_tells_how_exact_its_boundaries_are() -> None:
    lesson = Lesson(int8=True)
    lesson.run(X, X, X)
    there, back = (lesson.reports[-1].boundaries[name] for name in (THERE, BACK))
    assert there.codec == back.codec == "int8"
    assert 0 < there.error < 0.02 and 0 < back.error < 0.03
    assert there.raw_bytes == back.raw_bytes == ROWS * WIDTH * 4
    assert there.payload_bytes == 2 * (4 + 8 * (WIDTH + 2))
    assert min(there.encode_seconds, there.decode_seconds, back.encode_seconds, back.decode_seconds) > 0
    text = str(lesson.reports[-1]).splitlines()
    (heads,) = [line for line in text if line.startswith("  boundary ")]
    row = text[text.index(heads) + 1]
    assert row.split()[:3] == ["b0", "a->b", "int8"] and "4.0 KiB -> 1.0 KiB" in row and f"{there.error:.2g}" in row


def test_casts_are_told_like_all_others() -> None:
    lesson = Lesson(fp16=True, backward="bf16", nonfinite="skip")
    lesson.run(X)
    nb.shutdown()
    nb.init(links="10gbit,0ms")
    mere = Lesson(fp16=True, backward="bf16")
    mere.run(X)
    for name, codec, most in ((THERE, "fp16", 5e-4), (BACK, "bf16", 4e-3)):
        found = mere.reports[0].boundaries[name]
        assert found.codec == codec and found.payload_bytes * 2 == found.raw_bytes and found.decode_seconds > 0
        assert 0 < found.error < most
    assert found.codec == lesson.reports[0].boundaries[BACK].codec
    assert mere.reports[0].boundaries[THERE].error == lesson.reports[0].boundaries[THERE].error


def test_casts_over_lines_that_are_free_are_counted() -> None:
    free = Lesson(fp16=True, backward="bf16")
    free.run(X)
    nb.shutdown()
    nb.init(links="10gbit,0ms")
    slow = Lesson(fp16=True, backward="bf16")
    slow.run(X)
    for name in (THERE, BACK):
        one, other = (lesson.reports[0].boundaries[name] for lesson in (free, slow))
        assert (one.codec, one.wire_bytes, one.ratio, one.frames) == (
            other.codec, other.wire_bytes, other.ratio, other.frames
        )  # fmt: skip
    assert "fp16" in str(free.reports[0])


def test_a_step_says_what_changed_in_it(caplog: pytest.LogCaptureFixture) -> None:
    lesson = Lesson(int8=True, backward=None, start_step=2)
    with caplog.at_level(logging.INFO, "whale_nebula.runtime.run"):
        lesson.run(X, X, X, X)
    change = f"{THERE}: none -> int8"
    assert [change in report.notes for report in lesson.reports] == [False, False, True, False]
    assert lesson.reports[2].boundaries[THERE].notes == ("none -> int8",)
    (line,) = [record.message for record in caplog.records if "->" in record.message]
    assert line.endswith(change) and "step 3 of" in line
    assert f"note: {change}" in str(lesson.reports[2])


def test_a_basis_is_told_and_a_structure_that_does_not_shrink_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "whale_nebula.runtime.run"):
        Lesson(rank=8, int8=True).run(X, X)
        lesson = Lesson(svd=0.01, fp16=True, backward=None)
        lesson.run(X, X)
    lines = [each.message.partition(", ")[2] for each in caplog.records if each.name != "tensorflow"]
    fallen = f"{THERE}: svd(0.01) >> fp16 would not make float32[8, 64] smaller, so it is sent as fp16"
    assert lines == [f"{THERE}: basis 0 -> 1", fallen]
    assert [fallen in report.notes for report in lesson.reports] == [True, True]


# --------------------------------------------------------------------------------------- auto
@pytest.fixture
def fast_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages compute a millisecond a step, however busy this machine is."""
    monkeypatch.setattr(measured, "slowest", lambda medians, count: 1e-3 if medians else None)


def test_auto_takes_what_a_slow_line_needs_and_says_so(fast_stages: None) -> None:
    nb.shutdown()
    with nb.init(links="2mbit,0ms"):
        lesson = Lesson(codec="auto")
        lesson.run(X, X, X, X)
        found = lesson.reports[-1].boundaries
        assert {found[name].codec for name in (THERE, BACK)} == {"int4"}
        assert any(note.startswith(f"{THERE}: auto chooses ") for report in lesson.reports for note in report.notes)
        assert any(note.startswith(f"{BACK}: auto chooses ") for report in lesson.reports for note in report.notes)
        predicted = lesson.reports[-1].prediction.links
        for link, measured in lesson.reports[-1].links.items():
            assert predicted[link].bytes == measured.bytes


def test_auto_leaves_tensors_alone_where_lines_are_free() -> None:
    lesson, plain = Lesson(codec="auto"), Lesson(mask=True)
    lesson.run(X, X, X, X)
    plain.run(X, X, X, X)
    assert lesson.losses == plain.losses
    assert {each.codec for each in lesson.reports[-1].boundaries.values()} == {"none"}
    assert not lesson.reports[-1].notes and "\n  boundary " not in str(lesson.reports[-1])


# --------------------------------------------------------------------------------- NaN and infinity
def test_a_nan_that_would_stay_stops_the_step_and_changes_nothing() -> None:
    lesson = Lesson(4, rank=8, int8=True)
    lesson.run(X)
    before = lesson.state()
    with pytest.raises(NonFiniteError, match="b0 a->b") as caught:
        lesson.step(WORST, Y)
    assert (caught.value.stage, caught.value.step, caught.value.micro_batch) == ("a", 2, 0)
    assert same(before, lesson.state())
    lesson.run(X)
    assert np.isfinite(lesson.losses).all() and not same(before, lesson.state())


@pytest.mark.parametrize(
    "options", [{"rank": 8, "int8": True}, pytest.param({"fp16": True, "backward": None}, marks=pytest.mark.grid)]
)
def test_a_step_that_is_left_out_is_as_if_it_had_not_been(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lesson = Lesson(nonfinite="skip", **options)
    lesson.run(X, X)
    before = lesson.state()
    with caplog.at_level(logging.INFO, "whale_nebula.runtime.run"):
        lesson.run(WORST)
    assert same(before, lesson.state())
    assert np.isnan(lesson.losses[-1])
    said = f"skipped: {THERE} contains a NaN or an infinity in micro-batch 0 of stage 'a'"
    assert said in lesson.reports[-1].notes
    assert [record.message.endswith(said) for record in caplog.records if "is skipped" in record.message] == [True]
    lesson.run(X, X)
    assert np.isfinite(lesson.losses[-2:]).all()
    assert int(lesson.optimizer.iterations) == int(lesson.begun) == 4


def test_what_follows_a_step_that_was_left_out_is_what_would_have_followed() -> None:
    options: dict[str, Any] = {"rank": 8, "fp16": True, "backward": None}
    lesson, without = Lesson(nonfinite="skip", **options), Lesson(**options)
    lesson.run(X, WORST, X, X)
    without.run(X, X, X)
    assert [lesson.losses[0], *lesson.losses[2:]] == without.losses
    assert same(lesson.state(), without.state())


def test_a_gradient_with_a_nan_is_a_reason_as_well() -> None:
    lesson = Lesson(int8=True, nonfinite="skip")
    lesson.run(X)
    before = lesson.state()
    bad = Y.copy()
    bad[0, 0] = np.inf
    lesson.step(X, bad)
    assert same(before, lesson.state())
    assert any(BACK in note for note in nb.last_report().notes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"int4": True}, marks=pytest.mark.grid),
        pytest.param({"fp16": True, "backward": "fp16"}, marks=pytest.mark.grid),
        {"rank": 8, "bf16": True},
    ],
)
def test_a_loss_scale_that_overflows_is_halved_as_without_codecs(options: dict[str, Any]) -> None:
    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**15)

    lesson, plain = Lesson(optimizer=scaled(), **options), Lesson(optimizer=scaled(), mask=True)
    for each in (lesson, plain):
        start = each.state()[:2]
        each.run(X)
        before = each.state()[:2]
        assert not same(start, before) and float(each.optimizer.dynamic_scale) == 2.0**15
        each.step(X, 1e38 * Y)
        assert same(before, each.state()[:2]) and float(each.optimizer.dynamic_scale) == 2.0**14


@pytest.mark.grid
def test_keras_trains_on_after_a_step_that_was_left_out() -> None:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(2), nb.compress(rank=8, int8=True, nonfinite="skip"):
        with nb.stage(cluster="a"):
            hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH, activation="tanh")(inputs))
        with nb.stage(cluster="b"):
            model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    before = model.get_weights()
    done = model.fit(np.concatenate([WORST, X]), np.concatenate([Y, Y]), batch_size=ROWS, shuffle=False, verbose=0)
    assert np.isfinite(done.history["mae"]).all()
    assert int(model.optimizer.iterations) == 2
    assert all(np.isfinite(weight).all() for weight in model.get_weights()) and not same(before, model.get_weights())
