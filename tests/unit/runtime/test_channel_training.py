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
from whale_nebula.runtime.step import measurements

WIDTH, ROWS = 64, 16
THERE, BACK = "b0 a->b", "b0 b->a"
DRAWN = np.random.default_rng(0)
X, Y = DRAWN.standard_normal((ROWS, 6)).astype("float32"), DRAWN.standard_normal((ROWS, 2)).astype("float32")
X_WITH_NAN = X.copy()
X_WITH_NAN[1, 1] = np.nan


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    with nb.init(seed=1):
        yield


class TrainedFunction:
    """A function of two stages with its weights, its optimizer, and a counter that it counts up before all else."""

    def __init__(self, micro_batches: int = 2, optimizer: Any = None, **options: Any) -> None:
        drawn = np.random.default_rng(1)
        shapes = (6, WIDTH), (WIDTH, 2)
        self.w, self.v = (tf.Variable(drawn.standard_normal(shape).astype("float32")) for shape in shapes)
        self.started_steps, self.loss_sum = tf.Variable(0), tf.Variable(0.0)
        self.optimizer = optimizer or keras.optimizers.Adam(0.01)
        self.optimizer.build([self.w, self.v])
        self.losses: list[float] = []
        self.reports: list[Report] = []
        self.step = self._step(micro_batches, options)

    def _step(self, micro_batches: int, options: dict[str, Any]) -> Callable[..., Any]:
        @nb.function
        def step(x: Any, y: Any) -> Any:
            self.started_steps.assign_add(1)
            with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batches), nb.compress(**options):
                with nb.stage(cluster="a"):
                    hidden = tf.tanh(x @ self.w)
                with nb.stage(cluster="b"):
                    loss = tf.reduce_mean((hidden @ self.v - y) ** 2)
                    scaled_loss = self.optimizer.scale_loss(loss)
            variables = [self.w, self.v]
            gradients = tape.gradient(scaled_loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            self.loss_sum.assign_add(loss)
            return loss

        return step

    def run(self, *batches: Any) -> None:
        for x in batches:
            self.losses.append(float(self.step(x, Y)))
            self.reports.append(nb.last_report())

    def state(self) -> list[np.ndarray]:
        own = [self.w, self.v, self.started_steps, self.loss_sum]
        return [np.asarray(variable) for variable in (*own, *self.optimizer.variables)]


def are_equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------- reports
def test_report_has_error_bytes_and_seconds_of_boundaries() -> None:
    trained = TrainedFunction(int8=True)
    trained.run(X, X, X)
    there, back = (trained.reports[-1].boundaries[name] for name in (THERE, BACK))
    assert there.codec == back.codec == "int8"
    assert 0 < there.error < 0.02 and 0 < back.error < 0.03
    assert there.raw_bytes == back.raw_bytes == ROWS * WIDTH * 4
    assert there.payload_bytes == 2 * (4 + 8 * (WIDTH + 2))
    assert min(there.encode_seconds, there.decode_seconds, back.encode_seconds, back.decode_seconds) > 0
    text = str(trained.reports[-1]).splitlines()
    (heads,) = [line for line in text if line.startswith("  boundary ")]
    row = text[text.index(heads) + 1]
    assert row.split()[:3] == ["b0", "a->b", "int8"] and "4.0 KiB -> 1.0 KiB" in row and f"{there.error:.2g}" in row


def test_casts_are_reported_with_bytes_and_errors() -> None:
    trained = TrainedFunction(fp16=True, backward="bf16", nonfinite="skip")
    trained.run(X)
    nb.shutdown()
    nb.init(links="10gbit,0ms")
    plain = TrainedFunction(fp16=True, backward="bf16")
    plain.run(X)
    for name, codec, most in ((THERE, "fp16", 5e-4), (BACK, "bf16", 4e-3)):
        found = plain.reports[0].boundaries[name]
        assert found.codec == codec and found.payload_bytes * 2 == found.raw_bytes and found.decode_seconds > 0
        assert 0 < found.error < most
    assert found.codec == trained.reports[0].boundaries[BACK].codec
    assert plain.reports[0].boundaries[THERE].error == trained.reports[0].boundaries[THERE].error


def test_casts_over_free_links_are_counted() -> None:
    free = TrainedFunction(fp16=True, backward="bf16")
    free.run(X)
    nb.shutdown()
    nb.init(links="10gbit,0ms")
    slow = TrainedFunction(fp16=True, backward="bf16")
    slow.run(X)
    for name in (THERE, BACK):
        one, other = (trained.reports[0].boundaries[name] for trained in (free, slow))
        assert (one.codec, one.wire_bytes, one.ratio, one.frames) == (
            other.codec, other.wire_bytes, other.ratio, other.frames
        )  # fmt: skip
    assert "fp16" in str(free.reports[0])


def test_codec_change_is_noted_in_the_report_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    trained = TrainedFunction(int8=True, backward=None, start_step=2)
    with caplog.at_level(logging.INFO, "whale_nebula.runtime.run"):
        trained.run(X, X, X, X)
    change = f"{THERE}: none -> int8"
    assert [change in report.notes for report in trained.reports] == [False, False, True, False]
    assert trained.reports[2].boundaries[THERE].notes == ("none -> int8",)
    (line,) = [record.message for record in caplog.records if "->" in record.message]
    assert line.endswith(change) and "step 3 of" in line
    assert f"note: {change}" in str(trained.reports[2])


def test_new_basis_and_unused_structure_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "whale_nebula.runtime.run"):
        TrainedFunction(rank=8, int8=True).run(X, X)
        trained = TrainedFunction(svd=0.01, fp16=True, backward=None)
        trained.run(X, X)
    lines = [each.message.partition(", ")[2] for each in caplog.records if each.name != "tensorflow"]
    fallen = f"{THERE}: svd(0.01) >> fp16 would not make float32[8, 64] smaller, so it is sent as fp16"
    assert lines == [f"{THERE}: basis 0 -> 1", fallen]
    assert [fallen in report.notes for report in trained.reports] == [True, True]


# --------------------------------------------------------------------------------------- auto
@pytest.fixture
def fast_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages compute a millisecond a step, however busy this machine is."""
    monkeypatch.setattr(measurements, "find_slowest_seconds", lambda medians, count: 1e-3 if medians else None)


def test_auto_chooses_int4_on_a_slow_link_and_notes_it(fast_stages: None) -> None:
    nb.shutdown()
    with nb.init(links="2mbit,0ms"):
        trained = TrainedFunction(codec="auto")
        trained.run(X, X, X, X)
        found = trained.reports[-1].boundaries
        assert {found[name].codec for name in (THERE, BACK)} == {"int4"}
        assert any(note.startswith(f"{THERE}: auto chooses ") for report in trained.reports for note in report.notes)
        assert any(note.startswith(f"{BACK}: auto chooses ") for report in trained.reports for note in report.notes)
        predicted = trained.reports[-1].prediction.links
        for link, measured in trained.reports[-1].links.items():
            assert predicted[link].bytes == measured.bytes


def test_auto_compresses_nothing_on_free_links() -> None:
    trained, plain = TrainedFunction(codec="auto"), TrainedFunction(mask=True)
    trained.run(X, X, X, X)
    plain.run(X, X, X, X)
    assert trained.losses == plain.losses
    assert {each.codec for each in trained.reports[-1].boundaries.values()} == {"none"}
    assert not trained.reports[-1].notes and "\n  boundary " not in str(trained.reports[-1])


# --------------------------------------------------------------------------------- NaN and infinity
def test_nan_with_a_stateful_codec_fails_the_step_unchanged() -> None:
    trained = TrainedFunction(4, rank=8, int8=True)
    trained.run(X)
    before = trained.state()
    with pytest.raises(NonFiniteError, match="b0 a->b") as caught:
        trained.step(X_WITH_NAN, Y)
    assert (caught.value.stage, caught.value.step, caught.value.micro_batch) == ("a", 2, 0)
    assert are_equal(before, trained.state())
    trained.run(X)
    assert np.isfinite(trained.losses).all() and not are_equal(before, trained.state())


@pytest.mark.parametrize(
    "options", [{"rank": 8, "int8": True}, pytest.param({"fp16": True, "backward": None}, marks=pytest.mark.grid)]
)
def test_skipped_step_changes_no_variable(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    trained = TrainedFunction(nonfinite="skip", **options)
    trained.run(X, X)
    before = trained.state()
    with caplog.at_level(logging.INFO, "whale_nebula.runtime.run"):
        trained.run(X_WITH_NAN)
    assert are_equal(before, trained.state())
    assert np.isnan(trained.losses[-1])
    message = f"skipped: {THERE} contains a NaN or an infinity in micro-batch 0 of stage 'a'"
    assert message in trained.reports[-1].notes
    assert [record.message.endswith(message) for record in caplog.records if "is skipped" in record.message] == [True]
    trained.run(X, X)
    assert np.isfinite(trained.losses[-2:]).all()
    assert int(trained.optimizer.iterations) == int(trained.started_steps) == 4


def test_steps_after_a_skipped_step_train_as_without_it() -> None:
    options: dict[str, Any] = {"rank": 8, "fp16": True, "backward": None}
    trained, without = TrainedFunction(nonfinite="skip", **options), TrainedFunction(**options)
    trained.run(X, X_WITH_NAN, X, X)
    without.run(X, X, X)
    assert [trained.losses[0], *trained.losses[2:]] == without.losses
    assert are_equal(trained.state(), without.state())


def test_infinite_gradient_skips_the_step() -> None:
    trained = TrainedFunction(int8=True, nonfinite="skip")
    trained.run(X)
    before = trained.state()
    bad = Y.copy()
    bad[0, 0] = np.inf
    trained.step(X, bad)
    assert are_equal(before, trained.state())
    assert any(BACK in note for note in nb.last_report().notes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"int4": True}, marks=pytest.mark.grid),
        pytest.param({"fp16": True, "backward": "fp16"}, marks=pytest.mark.grid),
        {"rank": 8, "bf16": True},
    ],
)
def test_loss_scale_is_halved_on_overflow_as_without_codecs(options: dict[str, Any]) -> None:
    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**15)

    trained, plain = TrainedFunction(optimizer=scaled(), **options), TrainedFunction(optimizer=scaled(), mask=True)
    for each in (trained, plain):
        start = each.state()[:2]
        each.run(X)
        before = each.state()[:2]
        assert not are_equal(start, before) and float(each.optimizer.dynamic_scale) == 2.0**15
        each.step(X, 1e38 * Y)
        assert are_equal(before, each.state()[:2]) and float(each.optimizer.dynamic_scale) == 2.0**14


@pytest.mark.grid
def test_fit_continues_after_a_skipped_step() -> None:
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
    done = model.fit(np.concatenate([X_WITH_NAN, X]), np.concatenate([Y, Y]), batch_size=ROWS, shuffle=False, verbose=0)
    assert np.isfinite(done.history["mae"]).all()
    assert int(model.optimizer.iterations) == 2
    assert all(np.isfinite(weight).all() for weight in model.get_weights()) and not are_equal(
        before, model.get_weights()
    )
