"""Micro-batches together have the results of the batch: accumulated gradients, assertions, seeds, whole numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import BatchCoupledError, CaptureError, NebulaWarning, StageFailedError
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.rules import COUPLED, Fold, coupling_error
from whale_nebula.passes.rules.registry import BESIDE, FIXED
from whale_nebula.runtime.step.rollback import Guard

ROWS = np.arange(32, dtype="float32").reshape(8, 4) / 10
WEIGHTS = np.linspace(-1.0, 1.0, 16, dtype="float32").reshape(4, 4)


# --------------------------------------------------------------------------- gradients of what is made on the way
GradientRequest = Callable[[Any, Any, Any, Any], Any]


def gradient_of_weights(tape: Any, e: Any, r: Any, made: Any) -> Any:
    return tape.gradient(made["squares"], e)


def gradient_of_mean(tape: Any, e: Any, r: Any, made: Any) -> Any:
    return tape.gradient(made["loss"], made["mean"])


def gradients_of_sums(tape: Any, e: Any, r: Any, made: Any) -> Any:
    return tape.gradient(made["loss"], [made["sum"], made["number"]])


def gradient_of_rows(tape: Any, e: Any, r: Any, made: Any) -> Any:
    return tape.gradient(made["loss"], made["rows"])


def compute_requested_gradients(compute: GradientRequest, micro_batch: int, links: str | None = None) -> list[Any]:
    """What a step returns that asks for gradients of values that it has made; without micro-batches it is not cut."""
    weights = tf.Variable(WEIGHTS)

    def step(x: Any) -> Any:
        around = nb.pipeline(micro_batch) if micro_batch else contextlib.nullcontext()
        with tf.GradientTape(persistent=True) as tape, around:
            with nb.stage(cluster="gpu") if micro_batch else contextlib.nullcontext():
                e = tf.boolean_mask(tf.nn.l2_normalize(weights, 0), weights[:, 0] > -9.0)
                h = tf.tanh(x @ e)
            with nb.stage(cluster="npu") if micro_batch else contextlib.nullcontext():
                r = h @ weights
                mean, added, number = tf.reduce_mean(r, 0), tf.reduce_sum(r, 0), tf.reduce_sum(r)
                loss = 3 * tf.reduce_mean(mean) + tf.reduce_sum(0.1 * added) + 0.5 * number
                squares = tf.reduce_mean(r**2)
        made = {"rows": r, "mean": mean, "sum": added, "number": number, "loss": loss, "squares": squares}
        return compute(tape, e, r, made)

    if not micro_batch:
        return [each.numpy() for each in tf.nest.flatten(step(tf.constant(ROWS)))]
    with nb.init(links=links):
        return [each.numpy() for each in tf.nest.flatten(nb.function(step)(ROWS))]


@pytest.mark.parametrize(
    ("compute", "links"),
    [
        (gradient_of_weights, None),
        (gradient_of_mean, "10gbit,0ms"),
        pytest.param(gradients_of_sums, None, marks=pytest.mark.grid),
        (gradient_of_rows, "10gbit,0ms"),
    ],
)
def test_gradients_of_intermediate_values_are_merged_exactly(compute: GradientRequest, links: str | None) -> None:
    for one, other in zip(
        compute_requested_gradients(compute, 0), compute_requested_gradients(compute, 3, links), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_gradient_that_cannot_be_merged_is_refused() -> None:
    def compute(tape: Any, e: Any, r: Any, made: Any) -> Any:
        with tape:
            across = tf.transpose(r)
            loss = tf.reduce_mean(across**2)
        return tape.gradient(loss, across)

    assert compute_requested_gradients(compute, 0)[0].shape == (4, 8)
    with pytest.raises(BatchCoupledError, match="a requested gradient") as caught:
        compute_requested_gradients(compute, 3)
    assert "axis 1" in caught.value.why


# --------------------------------------------------------------------------- assertions
def run_with_assertion(check: Callable[[Any], Any], micro_batch: int, variable: tf.Variable | None = None) -> float:
    """The loss of a step that asserts something of its rows."""
    variable = tf.Variable(1.0) if variable is None else variable

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.pipeline(micro_batch):
            with nb.stage(cluster="gpu"):
                h = x * variable
            with nb.stage(cluster="npu"):
                r = h * 1.0
                check(r)
                loss = tf.reduce_mean(r)
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        return loss

    return float(step(ROWS))


TOTAL = float(ROWS.sum())
HOLDS: list[Callable[[Any], Any]] = [
    lambda r: tf.debugging.assert_less(tf.reduce_sum(r), TOTAL + 1),
    lambda r: tf.debugging.assert_greater(tf.reduce_sum(r), TOTAL - 1),
    lambda r: tf.debugging.assert_greater(tf.shape(r)[0], 5),
    lambda r: tf.debugging.assert_less(tf.abs(tf.reduce_mean(r) - ROWS.mean()), 0.1),
    lambda r: tf.debugging.assert_equal(tf.shape(r)[0], tf.shape(r * 2.0)[0]),
    lambda r: (tf.debugging.assert_less(tf.reduce_sum(r), TOTAL + 1), tf.debugging.assert_less(r, 9.0)),
]
FAILS: list[Callable[[Any], Any]] = [
    lambda r: tf.debugging.assert_less(tf.reduce_sum(r), TOTAL - 1),
    lambda r: tf.debugging.assert_less(tf.shape(r)[0], 5),
    lambda r: tf.debugging.assert_less(r, 3.0),
]


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=pytest.mark.grid if number in (1, 4) else ()) for number in range(len(HOLDS))]
)
def test_assertion_that_holds_for_the_batch_passes(number: int) -> None:
    assert run_with_assertion(HOLDS[number], 4) == pytest.approx(ROWS.mean())


@pytest.mark.parametrize(("number", "links"), [(0, None), (1, "10gbit,0ms"), (2, "10gbit,0ms")])
def test_assertion_that_fails_for_the_batch_fails_before_the_update(number: int, links: str | None) -> None:
    nb.init(links=links)
    variable = tf.Variable(1.0)
    with pytest.raises(StageFailedError, match="assertion failed") as caught:
        run_with_assertion(FAILS[number], 4, variable)
    assert not caught.value.torn
    assert float(variable) == 1.0


def test_failure_before_the_update_that_does_not_repeat_leaves_the_variables() -> None:
    calls: list[Any] = []

    def fail_once(x: Any) -> Any:
        calls.append(x)
        if len(calls) == 1:
            raise ValueError("out of memory")
        return x

    variable = tf.Variable(1.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="gpu"):
            h = tf.ensure_shape(tf.numpy_function(fail_once, [x * variable], tf.float32), x.shape)
        with nb.stage(cluster="npu"):
            total = tf.reduce_sum(h)
        variable.assign_add(1.0)
        return total

    with pytest.raises(StageFailedError, match="the step failed") as caught:
        step(ROWS)
    assert "out of memory" in caught.value.why
    assert not caught.value.torn and float(variable) == 1.0
    assert float(step(ROWS)) == pytest.approx(TOTAL) and float(variable) == 2.0


def test_ops_that_depend_on_a_batch_assertion_run_per_micro_batch() -> None:
    def run_with_limit(limit: float) -> float:
        variable = tf.Variable(1.0)

        @nb.function
        def step(x: Any) -> Any:
            with nb.pipeline(4):
                with nb.stage(cluster="gpu"):
                    h = x * variable
                with nb.stage(cluster="npu"):
                    check = tf.debugging.assert_less(tf.reduce_sum(h), limit)
                with nb.stage(cluster="npu"), tf.control_dependencies([check]):
                    return tf.reduce_sum(tf.identity(h))

        return float(step(ROWS))

    assert run_with_limit(TOTAL + 1) == pytest.approx(TOTAL)
    with pytest.raises(StageFailedError):
        run_with_limit(TOTAL - 1)


def test_lower_bound_assertion_on_a_maximum_is_refused() -> None:
    with pytest.raises(BatchCoupledError, match="an assertion") as caught:
        run_with_assertion(lambda r: tf.debugging.assert_greater(tf.reduce_max(r), 3.0), 4)
    assert "check them outside" in caught.value.mend


# --------------------------------------------------------------------------- seeds, whole numbers, row numbers
def compute_results(compute: Callable[[Any], Any], micro_batch: int) -> Any:
    """What a step returns that asks something of its rows; without micro-batches it is not cut."""
    if not micro_batch:
        return compute(tf.constant(ROWS)).numpy()

    @nb.function
    def step(x: Any) -> Any:
        with nb.pipeline(micro_batch):
            with nb.stage(cluster="gpu"):
                h = x * 1.0
            with nb.stage(cluster="npu"):
                r = h * 1.0
        return compute(r)

    return step(ROWS).numpy()


COUNT, SEED = tf.Variable(2), tf.Variable([0, 1])


def gather_every_second(r: Any) -> Any:
    numbers = tf.range(tf.shape(r)[0])
    return tf.gather(tf.reshape(tf.tile(r, [1, COUNT]), [-1]), numbers + numbers)


def gather_twice(r: Any) -> Any:
    numbers = tf.range(tf.shape(r)[0])
    return tf.reduce_sum(tf.gather(tf.repeat(r, 2, axis=0), tf.concat([numbers, numbers], 0)) * tf.range(4.0))


def add_noise_and_update_seed(r: Any) -> Any:
    found = r + tf.random.stateless_normal(tf.shape(r), SEED)
    SEED.assign_add([0, 1])
    return found


@pytest.mark.parametrize(
    "compute",
    [
        gather_every_second,
        gather_twice,
        add_noise_and_update_seed,
        lambda r: tf.gather(tf.reshape(tf.tile(r, [1, COUNT]), [-1]), tf.range(tf.shape(r)[0]) * COUNT),
        lambda r: tf.reduce_mean(tf.cast(r * 10, tf.int32)),
        lambda r: r + tf.random.stateless_normal(tf.shape(r), SEED),
        lambda r: tf.random.stateless_categorical(tf.zeros_like(r), 5, seed=[1, 2]),
    ],
)
def test_values_of_the_whole_batch_are_refused(compute: Callable[[Any], Any]) -> None:
    assert compute_results(compute, 0).size
    with pytest.raises(BatchCoupledError):
        compute_results(compute, 4)


# --------------------------------------------------------------------------- writes in branches and loops
def write_mean(state: tf.Variable, x: Any, h: Any, loss: Any) -> None:
    for _ in tf.range(2):
        state.assign(tf.reduce_mean(x))


def add_mean(state: tf.Variable, x: Any, h: Any, loss: Any) -> None:
    if state < 9.0:
        state.assign_add(tf.reduce_mean(h))


def add_sum(state: tf.Variable, x: Any, h: Any, loss: Any) -> None:
    for _ in tf.range(2):
        state.assign_add(tf.reduce_sum(h))


def follow_mean(state: tf.Variable, x: Any, h: Any, loss: Any) -> None:
    tf.cond(state < 9.0, lambda: state.assign(0.9 * state + 0.1 * tf.reduce_mean(h)), state.read_value)


def write_extreme(state: tf.Variable, x: Any, h: Any, loss: Any) -> None:
    if loss > 0.0:
        state.assign(tf.reduce_max(h))


@pytest.mark.parametrize(
    "write", [write_mean, add_mean, add_sum, follow_mean, write_extreme], ids=lambda each: each.__name__
)
def test_branch_that_writes_a_value_of_the_batch_writes_that_of_the_whole_batch(write: Callable[..., None]) -> None:
    def run(micro_batch: int) -> float:
        weight, state = tf.Variable(1.5), tf.Variable(1.0)

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, nb.pipeline(micro_batch) if micro_batch else contextlib.nullcontext():
                with nb.stage(cluster="gpu") if micro_batch else contextlib.nullcontext():
                    h = x * weight
                loss = tf.reduce_mean(h**2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            write(state, x, h, loss)
            return loss

        compiled = (nb.function if micro_batch else tf.function)(step)
        for _ in range(2):
            compiled(tf.constant(ROWS))
        return float(state)

    np.testing.assert_allclose(run(4), run(0), rtol=1e-6)


def test_row_blocks_of_unknown_size_are_merged_exactly() -> None:
    def found(r: Any) -> Any:
        long = tf.ensure_shape(tf.reshape(tf.tile(r, [1, COUNT * 2]), [tf.shape(r)[0], -1, 2]), [None, None, 2])
        size = tf.shape(long)[1]
        firsts = tf.range(tf.shape(long)[0]) * size
        return tf.gather(tf.reshape(long, [-1, 2]), firsts + 1)

    np.testing.assert_array_equal(compute_results(found, 4), compute_results(found, 0))


def test_integer_means_of_rows_are_rounded_as_uncut() -> None:
    def per_row(r: Any) -> Any:
        return tf.reduce_mean(tf.cast(r * 10, tf.int32), 1)

    np.testing.assert_array_equal(compute_results(per_row, 4), compute_results(per_row, 0))


# --------------------------------------------------------------------------- boundaries without rows of the batch
@pytest.mark.parametrize("rows", ["fixed", "of the batch"])
def test_boundary_independent_of_the_batch_is_noted(rows: str) -> None:
    weights = tf.Variable(WEIGHTS)

    @nb.function
    def step(x: Any) -> Any:
        noise = tf.random.normal([8 if rows == "fixed" else tf.shape(x)[0], 4])
        with nb.pipeline(micro_batch=4):
            with nb.stage(cluster="gpu"):
                made = noise @ weights
            with nb.stage(cluster="npu"):
                return tf.reduce_mean(made) + tf.reduce_mean(x)

    found = [note for note in nb.plan(step, ROWS).notes if "does not depend on the batch" in note]
    assert len(found) == (rows == "fixed")
    assert all("computed and sent for each of 4 micro-batches" in note and __file__ in note for note in found)


# -------------------- Ops with sizes from the batch's own shape couple no rows; refusals give the true reason
RANDOM = np.random.default_rng(0)
X = RANDOM.random((8, 5, 4)).astype("float32")


def test_step_without_updates_is_never_torn() -> None:
    for updates in (True, False):
        guard = Guard({}, [], updates=updates)
        guard.begin()
        with pytest.raises(StageFailedError) as caught, guard.explain_phase_failure("update", 0):
            raise tf.errors.InvalidArgumentError(None, None, "Incompatible shapes")
        assert caught.value.torn is updates
        assert ("torn" in caught.value.what) is updates


# ---------------------------------------------------------------------- words of refusals
def catch_refusal(body: Callable[[Any], Any]) -> str:
    """The refusal of a step with this loss when it is cut."""
    weights = tf.Variable(tf.ones((4, 4)))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.stage(name="one"):
            loss = body(x @ weights)
        return tape.gradient(loss, weights)

    with nb.pipeline(micro_batch=4), pytest.raises(BatchCoupledError) as caught:
        step(X)
    return str(caught.value)


HEADLINES = {
    "no rule": (lambda h: tf.reduce_mean(tf.linalg.sqrtm(h[:, :4, :4])), "is not known: there is no rule for op type"),
    "undecided": (
        lambda h: tf.reduce_mean(tf.tensor_scatter_nd_add(h, [[0], [1]], tf.ones((2, 5, 4)))),
        "is not known: no rule",
    ),
    "coupled": (lambda h: tf.reduce_mean(h - tf.reduce_mean(h, 0)) ** 2, "neither a sum nor a mean|depend on each"),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_missing_fold_rule_is_not_reported_as_coupled_rows(case: str) -> None:
    body, headline = HEADLINES[case]
    first_line = catch_refusal(body).partition("\n")[0]
    assert any(part in first_line for part in headline.split("|")), first_line
    assert ("depend on each other" in first_line) is False or case == "coupled"


def test_fix_for_a_fixed_number_of_rows_works() -> None:
    """`coupled="allow"` would fail with the first micro-batch; rows as many as the batch's do not."""
    weights = tf.Variable(tf.ones(5))
    for reason in (BESIDE, FIXED):
        refusal = coupling_error(Fold(COUPLED, reason=reason), Graph(()))
        assert refusal is not None and "tf.fill([tf.shape(x)[0], 1], value)" in refusal.mend
        assert "allow" not in refusal.mend

    @nb.function
    def decode(x: Any) -> Any:
        with nb.stage(name="one"):
            return tf.concat([tf.fill([tf.shape(x)[0], 1], 1.0), x * weights], axis=1)

    with nb.pipeline(micro_batch=4):
        np.testing.assert_array_equal(decode(X[:, :, 0]), np.concatenate([np.ones((8, 1)), X[:, :, 0]], 1))


def test_fix_for_an_argument_without_a_batch_axis_is_whole() -> None:
    def make_step() -> Callable[[Any], Any]:
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])

        def step(state: Any) -> Any:
            with nb.stage(cluster="gpu"):
                return tf.reduce_sum(model(tf.expand_dims(state, 0)))

        return step

    with pytest.raises(CaptureError, match="cannot be traced") as caught:
        nb.function(make_step())(tf.ones(4))
    assert '@nb.function(whole=("state",))' in caught.value.mend
    assert np.isfinite(float(nb.function(whole=("state",))(make_step())(tf.ones(4))))


def test_step_without_a_batch_warns_and_runs_undivided() -> None:
    @nb.function
    def step() -> Any:
        with nb.stage(name="one"):
            return tf.reduce_sum(tf.ones((4, 4)))

    with nb.pipeline(micro_batch=4), pytest.warns(NebulaWarning, match="the step has no batch: it runs undivided"):
        assert float(step()) == 16.0


# -------------------- Steps with loops and branches that TensorFlow wraps, or creates in its old form
BODY_ROWS = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")


def compute_gradients(cut: bool, micro_batch: int, loss: Callable[[Any], Any]) -> list[Any]:
    first, second = tf.Variable(tf.eye(4) * 0.5), tf.Variable(tf.eye(4))

    def stage(cluster: str) -> contextlib.AbstractContextManager[Any]:
        return nb.stage(cluster=cluster) if cut else contextlib.nullcontext()

    def step(x: Any) -> Any:
        around = nb.pipeline(micro_batch) if cut else contextlib.nullcontext()
        with tf.GradientTape(persistent=True) as tape, around:
            with stage("a"):
                hidden = tf.tanh(x @ first)
            with stage("b"):
                found = loss(hidden @ second)
        return found, tape.gradient(found, first), tape.gradient(found, second)

    return [np.asarray(each) for each in (nb.function(step) if cut else step)(BODY_ROWS)]


def branch_loss(out: Any) -> Any:
    return tf.cond(tf.reduce_mean(out) > 0.0, lambda: tf.reduce_mean(out**2), lambda: tf.reduce_sum(out))


def loop_loss(out: Any) -> Any:
    return tf.while_loop(lambda turn, _: turn < 3, lambda turn, x: (turn + 1, x + tf.reduce_mean(out)), [0, 0.0])[1]


def ctc_loss_of(out: Any) -> Any:
    ones = tf.ones([tf.shape(out)[0]], tf.int32)
    scores = tf.stack([out, 2.0 * out, -out], 1)
    return tf.reduce_mean(tf.nn.ctc_loss(ones[:, None], scores, ones, 3 * ones, logits_time_major=False, blank_index=0))


@pytest.mark.parametrize(
    ("loss", "micro_batch"), [(branch_loss, 1), (loop_loss, 3), pytest.param(ctc_loss_of, 1, marks=pytest.mark.grid)]
)
def test_persistent_tape_over_loops_and_branches_is_exact(loss: Callable[[Any], Any], micro_batch: int) -> None:
    for expected, found in zip(
        compute_gradients(False, 1, loss), compute_gradients(True, micro_batch, loss), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
