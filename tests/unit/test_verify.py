"""`nb.verify`: it agrees with a correct plan, detects an incorrect one, and has no effects."""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import OptionError, PlanError, UnsupportedError, VerificationError
from whale_nebula.plan.verification import Row, Verification
from whale_nebula.runtime.run import current_run

layers = keras.layers


def normal(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, *shape)).astype("float32")


def build_model(micro: int = 2, rate: float = 0.0, coupled: str = "error", norm: bool = False) -> keras.Model:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(micro, coupled=coupled):
        with nb.stage(cluster="a"):
            hidden = layers.Dense(6, activation="tanh")(inputs)
            hidden = layers.Dropout(rate)(hidden) if rate else hidden
        with nb.stage(cluster="b"):
            hidden = layers.BatchNormalization()(hidden) if norm else hidden
            outputs = layers.Dense(3)(hidden)
    made = keras.Model(inputs, outputs)
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return made


def read_state(made: keras.Model) -> dict[str, np.ndarray]:
    metrics = [v for m in made.metrics for v in m.variables]
    return {v.path: np.array(v) for v in [*made.variables, *made.optimizer.variables, *metrics]}


def create_batch(rows: int = 7) -> tuple[np.ndarray, np.ndarray]:
    return normal(rows, 4), normal(rows, 3, seed=1)


@pytest.mark.parametrize(
    ("links", "micro"),
    [
        pytest.param(None, 2, marks=pytest.mark.grid),
        ("1gbit,0ms", 1),
        *(pytest.param(*each, marks=pytest.mark.grid) for each in ((None, 1), ("1gbit,0ms", 2))),
    ],
)
def test_verify_accepts_a_keras_model(links: str | None, micro: int) -> None:
    """In all that the step returns and writes."""
    nb.init(links=links)
    made = build_model(micro)
    found = nb.verify(made, *create_batch())
    assert found.ok
    assert found.comparable
    assert found.stages == ("a", "b")
    assert found.micro_batches == micro
    assert found.raise_if_bad() is found
    names = {row.name for row in found.rows}
    assert {"returned/loss", "returned/mae"} <= names
    assert {v.path for v in made.variables} <= names
    assert {v.path for v in made.optimizer.variables if "learning_rate" not in v.path} <= names
    assert any(name.startswith("mean_absolute_error") for name in names)


@pytest.mark.parametrize("links", [pytest.param(None, marks=pytest.mark.grid), "1gbit,0ms"])
def test_verify_changes_no_state(links: str | None) -> None:
    nb.init(links=links)
    made = build_model(rate=0.3)
    made.fit(*create_batch(16), verbose=0)
    before, report = read_state(made), nb.last_report()
    nb.verify(made, *create_batch())
    after = read_state(made)
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path], err_msg=path)
    assert nb.last_report() == report


def test_verify_accepts_the_arguments_of_fit() -> None:
    x, y = create_batch()
    assert nb.verify(build_model(), x.astype("float64"), y.astype("float64"), np.arange(7.0)).ok


def test_verify_accepts_a_function() -> None:
    weight = tf.Variable(normal(4, 4))

    @nb.function
    def step(x: Any, scale: float) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(3):
            with nb.stage(cluster="a"):
                hidden = tf.tanh(x @ weight)
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(hidden**2) * scale
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return {"loss": loss, "hidden": hidden}

    before = weight.numpy()
    found = nb.verify(step, normal(7, 4), 2.0)
    assert [row.name for row in found.rows] == ["returned/hidden", "returned/loss", weight.name.split(":")[0]]
    assert found.ok
    np.testing.assert_array_equal(weight.numpy(), before)


def test_verify_detects_a_nondeterministic_step() -> None:
    """A number from outside that changes from run to run: the two runs cannot agree."""
    calls: list[int] = []

    def outside() -> np.float32:
        calls.append(1)
        return np.float32(len(calls))

    weight = tf.Variable(2.0)

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = x * weight * tf.numpy_function(outside, [], tf.float32)
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(tf.reshape(hidden, [-1]) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    found = nb.verify(step, normal(4))
    assert not found.ok
    assert found.worst is not None
    assert "!" in str(found)
    with pytest.raises(VerificationError, match=found.worst.name) as caught:
        found.raise_if_bad()
    assert "give different results" in str(caught.value)
    assert float(weight) == 2.0


def test_dropout_with_micro_batches_is_not_comparable() -> None:
    found = nb.verify(build_model(rate=0.5), *create_batch())
    assert not found.comparable
    assert not found.ok
    assert not found
    assert "not comparable: each micro-batch draws its own random numbers" in found.to_text()
    assert "inf" not in found.to_text() and " none  returned/loss" in found.to_text()
    assert "mend: nb.pipeline(micro_batch=1), or a dropout rate of zero, for the check" in found.to_text()
    with pytest.raises(VerificationError, match="draws its own random numbers") as caught:
        found.raise_if_bad()
    assert "dropout rate of zero" in str(caught.value)


def test_dropout_with_one_micro_batch_is_comparable() -> None:
    found = nb.verify(build_model(micro=1, rate=0.5), *create_batch())
    assert found.comparable
    assert found
    assert found.worst is not None
    assert found.worst.error <= found.worst.limit


@pytest.mark.grid
def test_allowed_coupled_rows_are_not_comparable() -> None:
    found = nb.verify(build_model(coupled="allow", norm=True), *create_batch())
    assert not found.comparable
    assert any("depend on each other" in note for note in found.notes)
    assert found.mends == ("nb.pipeline(micro_batch=1) for the check",)
    assert not found.ok


def test_stateful_random_ops_are_not_comparable() -> None:
    @nb.function
    def draw(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            hidden = x + tf.random.uniform(tf.shape(x))
        with nb.cluster(), nb.stage(cluster="b"):
            return hidden * 2.0

    found = nb.verify(draw, normal(4, 2))
    assert not found.comparable
    assert not found.ok
    assert "keras.random.SeedGenerator" in str(found)


def test_plan_of_one_stage_has_a_note() -> None:
    @nb.function
    def double(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return 2.0 * x

    assert any("nothing is divided" in note for note in nb.verify(double, normal(3)).notes)


def test_half_precision_on_a_link_has_its_own_tolerance() -> None:
    nb.init(links="1gbit,0ms")
    weight = tf.Variable(normal(4, 4))

    @nb.function
    def forward(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"), nb.compress(fp16=True):
                hidden = tf.tanh(x @ weight)
            with nb.stage(cluster="b"):
                return hidden * 3.0

    found = nb.verify(forward, normal(5, 4))
    assert found.ok
    assert found.worst is not None
    assert found.worst.error > 0
    assert any("float16" in note and "1e-2" in note for note in found.notes)
    assert "match the uncut step, within half precision" in str(found)


def test_lossy_codec_is_not_comparable_and_keeps_channels() -> None:
    made = keras.Sequential([keras.Input((4,))])
    with nb.cluster(), nb.compress(rank=3, int8=True):
        with nb.stage(cluster="a"):
            made.add(layers.Dense(6))
        with nb.stage(cluster="b"):
            made.add(layers.Dense(3))
    made.compile("sgd", "mse")
    made.train_on_batch(*create_batch())
    run = current_run()
    before = dict(run.channels)
    found = nb.verify(made, *create_batch())
    assert not found.comparable
    assert any("b0 is sent as rank(3) >> int8, which is lossy" in note for note in found.notes)
    assert found.mends == ("remove nb.compress for the check",)
    assert before and run.channels == before


def test_lossless_codec_is_comparable() -> None:
    @nb.function
    def forward(x: Any) -> Any:
        with nb.cluster(), nb.compress(zstd=True):
            with nb.stage(cluster="a"):
                hidden = tf.tanh(x)
            with nb.stage(cluster="b"):
                return hidden * 3.0

    assert nb.verify(forward, normal(5, 4)).ok


def build_half_precision_model() -> keras.Model:
    """All that crosses does so in half precision; its SGD makes updates far smaller than its weights."""
    inputs = keras.Input((4,))
    with nb.cluster():
        with nb.stage(cluster="a"):
            hidden = layers.Dense(64, activation="relu")(inputs)
        with nb.stage(cluster="b"), nb.compress(fp16=True, backward="fp16"):
            outputs = layers.Dense(3)(hidden)
    made = keras.Model(inputs, outputs)
    made.compile(keras.optimizers.SGD(0.001), "mse")
    return made


@pytest.mark.grid
def test_limits_are_smaller_than_the_update() -> None:
    keras.utils.set_random_seed(1)
    made = build_half_precision_model()
    before = {v.path: np.array(v) for v in made.trainable_variables}
    found = {row.name: row for row in nb.verify(made, *create_batch(16)).rows}
    made.train_on_batch(*create_batch(16))
    for variable in made.trainable_variables:
        row, update = found[variable.path], float(np.linalg.norm(np.array(variable) - before[variable.path]))
        assert 0.0 <= row.error <= row.limit < 0.3 * update, row
        assert not row.noisy


def test_rounding_amplified_by_adam_is_noted_not_a_difference() -> None:
    """What a normalisation adds is taken off by the next one: only rounding is left of the gradient of the first."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    with nb.cluster():
        with nb.stage(cluster="a"):
            hidden = layers.BatchNormalization(name="first")(layers.Dense(6, name="one")(inputs))
        with nb.stage(cluster="b"):
            hidden = layers.BatchNormalization(name="second")(layers.Dense(6, name="two")(hidden))
            outputs = layers.Dense(3, name="three")(hidden)
    made = keras.Model(inputs, outputs)
    made.compile(keras.optimizers.Adam(0.01), "mse")
    found = nb.verify(made, *create_batch(16)).raise_if_bad()
    rows = {row.name: row for row in found.rows}
    assert rows["first/beta"].noisy
    assert not rows["three/kernel"].noisy
    assert any("rounding alone" in note for note in found.notes)
    assert "\n  ~" in found.to_text(every=True)


def test_nan_in_both_runs_is_no_difference() -> None:
    total = tf.Variable(1.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                hidden = x * 2.0
            with nb.stage(cluster="b"):
                worse = tf.reduce_sum(hidden) * float("nan")
        total.assign(worse)
        return {"hidden": hidden, "worse": worse}

    found = nb.verify(step, normal(4))
    assert found.ok, str(found)
    assert any("NaN or infinite values" in note and "returned/worse, " in note for note in found.notes)


@pytest.mark.parametrize(
    ("subject", "arguments", "message"),
    [
        (tf.function(lambda x: x), (1.0,), "cannot run"),
        ("model", (1.0,), "cannot run a str"),
        (keras.Sequential([keras.Input((4,)), layers.Dense(2)]), create_batch(), "not compiled"),
    ],
)
def test_verify_refuses_other_objects(subject: Any, arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        nb.verify(subject, *arguments)


def build_unscoped_model() -> keras.Model:
    made = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize(
    ("subject", "arguments"),
    [(build_unscoped_model(), create_batch()), (nb.function(lambda x: 2.0 * x), (normal(4, 2),))],
)
def test_verify_refuses_unscoped_steps_like_plan(subject: Any, arguments: Any) -> None:
    with pytest.raises(PlanError, match="has no scopes") as refused:
        nb.verify(subject, *arguments)
    with pytest.raises(PlanError) as planned:
        nb.plan(subject, *arguments)
    assert (refused.value.what, refused.value.why) == (planned.value.what, planned.value.why)


def test_verify_refuses_too_many_arguments() -> None:
    with pytest.raises(OptionError, match="x, y and sample_weight"):
        nb.verify(build_model(), 1, 2, 3, 4)


def test_verify_refuses_run_eagerly() -> None:
    made = build_model()
    made.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(UnsupportedError):
        nb.verify(made, *create_batch())


def test_row_and_verification_status() -> None:
    assert Row("a", 0.0, 0.0).ok
    assert not Row("a", math.nan, 1.0).ok
    assert Row("a", math.nan, 1.0).badness == math.inf
    assert Row("a", 1.0, 0.0).badness == math.inf
    assert Row("a", 5.0, math.inf).ok
    assert Verification(()).worst is None
    assert Verification(()).ok
    assert not Verification((Row("a", 2.0, 1.0),))
    assert not Verification((), comparable=False).ok


def test_text_lists_the_largest_errors() -> None:
    rows = tuple(Row(f"t{number}", float(number), 299.5) for number in range(301))
    text = Verification(rows).to_text()
    assert "  !3.0e+02  3.0e+02  t300" in text
    assert "t277" in text
    assert "t1\n" not in text
    assert "  and 277 more with smaller errors: to_text(every=True) lists them" in text
    assert len(Verification(rows).to_text(every=True).splitlines()) == 2 + 301


def test_text_lists_all_differences() -> None:
    rows = tuple(Row(f"t{number}", 2.0, 1.0) for number in range(40))
    assert len(Verification(rows).to_text().splitlines()) == 2 + 40


def test_headline_has_all_reasons() -> None:
    found = Verification((), ("a",), 2, False, ("rows meet", "it draws", "a remark"), ("mend it", "or so"), reasons=2)
    assert found.to_text().splitlines()[0].endswith("not comparable: rows meet; and it draws")
    assert found.to_text().splitlines()[-1] == "note: a remark"


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_empty_batch_is_not_comparable(micro: int) -> None:
    found = nb.verify(build_model(micro), *create_batch(0))
    assert not found.ok
    assert "not comparable: the batch has no rows, so nothing was compared" in str(found)


def test_complex_values_are_compared() -> None:
    weight = tf.Variable(tf.complex(normal(4, 4), normal(4, 4, seed=1)))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="a"):
                hidden = tf.signal.fft(tf.cast(x, tf.complex64)) @ weight
            with nb.stage(cluster="b"):
                found = tf.reduce_mean(hidden * tf.math.conj(hidden))
                loss = tf.math.real(found)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss, found, hidden

    verified = nb.verify(step, tf.constant(normal(7, 4)))
    assert verified.ok, verified
    assert all(row.limit > 0 for row in verified.rows)


def test_failure_of_the_uncut_step_is_raised_and_changes_nothing() -> None:
    made = build_model()
    made.train_on_batch(*create_batch())
    before = read_state(made)
    with pytest.raises(nb.errors.StageFailedError, match="the uncut step failed") as caught:
        nb.verify(made, normal(8, 4), normal(5, 3))
    assert "Incompatible shapes" in caught.value.why and "as they were" in caught.value.mend
    for path, value in read_state(made).items():
        np.testing.assert_array_equal(before[path], value, err_msg=path)
