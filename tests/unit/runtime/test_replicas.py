"""Replicas in one process: for any number of them the step equals that of the same micro-batches."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NestingError, OptionError
from whale_nebula.runtime.step.actors import RunningStep
from whale_nebula.runtime.step.local import EmulatedStep

X = np.random.default_rng(0).random((24, 8)).astype("float32")
Y = np.random.default_rng(1).random((24, 1)).astype("float32")
LINE = "1gbit,0ms"


def model(
    copies: tuple[int, ...] = (),
    micro_batch: int = 1,
    *,
    around: bool = False,
    dropout: float = 0.0,
    coupled: str = "error",
    codec: Mapping[str, Any] | None = None,
) -> keras.Model:
    """One stage or two, in these replicas; no scopes where there are none. `around`: one pipeline around them."""
    keras.utils.set_random_seed(0)
    outer = nb.pipeline(micro_batch, coupled=coupled) if around else contextlib.nullcontext()
    inputs = keras.Input((8,))

    def at(number: int) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if copies:
            stage = min(number, len(copies) - 1)
            stack.enter_context(nb.replica(copies[stage]))
            stack.enter_context(contextlib.nullcontext() if around else nb.pipeline(micro_batch, coupled=coupled))
            stack.enter_context(nb.stage(cluster=f"c{stage}"))
            stack.enter_context(nb.compress(**codec) if codec else contextlib.nullcontext())
        return stack

    with nb.cluster() if copies else contextlib.nullcontext(), outer:
        with at(0):
            hidden = keras.layers.Dense(16, activation="tanh")(inputs)
            hidden = keras.layers.Dropout(dropout)(hidden)
            if coupled == "allow":
                hidden = keras.layers.BatchNormalization()(hidden)
        with at(1):
            outputs = keras.layers.Dense(1)(hidden)
    made = keras.Model(inputs, outputs)
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0), "mse", metrics=["mae"])
    return made


def train(made: keras.Model) -> tuple[list[float], list[np.ndarray]]:
    history = made.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
    return [*history["loss"], *history["mae"]], made.get_weights()


@functools.cache
def train_uncut() -> tuple[list[float], list[np.ndarray]]:
    """What the model is trained to without scopes."""
    made = model()
    made.run_eagerly = True  # so few uncut steps are not worth a trace
    return train(made)


@functools.cache
def train_in_replicas(
    copies: tuple[int, ...], micro_batch: int, **options: Any
) -> tuple[list[float], list[np.ndarray], nb.Report]:
    """What the model is trained to in replicas, and the report of its last step; once for all tests that ask."""
    with nb.init(links=LINE):
        losses, weights = train(model(copies, micro_batch, **options))
        return losses, weights, nb.last_report()


def close(ours: Any, theirs: Any) -> None:
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


ALL = [(copies, many) for copies in ((1,), (2,), (3,), (4,), (1, 3), (2, 2), (4, 3)) for many in (1, 4, 6)]
SAMPLE = [((1, 3), 4)]


@pytest.mark.parametrize(
    ("copies", "micro_batch"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.grid) for case in ALL],
    ids=str,
)
def test_step_equals_the_uncut_step(copies: tuple[int, ...], micro_batch: int) -> None:
    expected = train_uncut()
    losses, weights, _ = train_in_replicas(copies, micro_batch)
    close(losses, expected[0])
    close(weights, expected[1])


@pytest.mark.grid
def test_codec_state_does_not_depend_on_the_number_of_replicas() -> None:
    found = []
    for copies in ((1, 1), (3, 2)):
        with nb.init(links=LINE):
            found.append(train(model(copies, 3, codec={"rank": 4}))[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.grid
def test_batch_norm_averages_are_written_in_micro_batch_order() -> None:
    found = []
    for copies in ((1, 1), (3, 2)):
        found.append(train_in_replicas(copies, 3, coupled="allow")[1])
    close(found[1], found[0])


def test_plan_divides_the_batch_for_all_replicas() -> None:
    plan = nb.plan(model((2, 3)), X, Y)
    assert plan.rows == (8, 8, 8)
    assert [stage.replicas for stage in plan.stages.values()] == [2, 3]
    assert "3 replicas" in plan.to_text() and "c1.2 |" in plan.to_text()


def test_replicas_are_timed_separately() -> None:
    _, _, report = train_in_replicas((1, 3), 4)
    assert {span.lane for span in report.timeline()} >= {"c0", "c1.0", "c1.1", "c1.2"}
    assert len(report.stages["c1"].replicas) == 3 and not report.stages["c0"].replicas
    assert report.stages["c1"].idle_seconds >= 0.0


def test_replica_without_stages_copies_the_whole_model() -> None:
    inputs = keras.Input((8,))
    with nb.cluster(), nb.replica(4):
        outputs = keras.layers.Dense(1)(inputs)
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    plan = nb.plan(made, X, Y)
    assert plan.stages["stage0"].replicas == 4 and plan.rows == (6, 6, 6, 6)
    assert nb.verify(made, X, Y).ok


@pytest.mark.parametrize(
    ("workers", "inside", "expected"),
    [
        (4, 1, 4),
        (4, 2, 2),
        pytest.param(1, 1, 1, marks=pytest.mark.grid),
        pytest.param(3, 2, 1, marks=pytest.mark.grid),
    ],
)
def test_replica_without_a_count_fills_the_workers_of_the_cluster(workers: int, inside: int, expected: int) -> None:
    addresses = [f"127.0.0.1:{7000 + number}" for number in range(workers)]
    with nb.init({"clusters": {"gpu": {"workers": addresses}}}):
        inputs = tensor = keras.Input((8,))
        with nb.cluster(), nb.replica():
            for number in range(inside):
                with nb.stage(name=f"s{number}", cluster="gpu"):
                    tensor = keras.layers.Dense(8)(tensor)
        made = keras.Model(inputs, tensor)
        made.compile("sgd", "mse")
        plan = nb.plan(made, X, X)
    assert [stage.replicas for stage in plan.stages.values()] == [expected] * inside


def test_sparse_and_input_gradients_keep_the_order_of_the_batch() -> None:
    table, weight = tf.Variable(tf.random.stateless_normal((20, 4), [1, 2])), tf.Variable(tf.ones((4, 1)))

    def body(ids: Any, x: Any, around: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with around(0):
                rows = tf.gather(table, ids) * x
            with around(1):
                loss = tf.reduce_mean((rows @ weight) ** 2)
        slices, to_input, dense = tape.gradient(loss, [table, x, weight])
        return loss, slices.values, slices.indices, to_input, dense

    @nb.function
    def step(ids: Any, x: Any) -> Any:
        return body(ids, x, lambda n: open_scopes(n))

    @contextlib.contextmanager
    def open_scopes(number: int) -> Iterator[None]:
        with nb.replica(2 + number), nb.stage(cluster=f"c{number}"):
            yield

    ids, x = tf.constant([3, 1, 4, 1, 5, 9, 2]), tf.random.stateless_normal((7, 4), [3, 4])
    with nb.init(links=LINE):
        found = step(ids, x)
    close([np.asarray(t) for t in found], [np.asarray(t) for t in body(ids, x, lambda n: contextlib.nullcontext())])


def test_replica_without_a_stage_next_to_stages_is_refused() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="c0"):
            y = x * 2.0
        with nb.replica(2):
            return y + 1.0

    with pytest.raises(NestingError, match=r"nb\.replica\(2\) at .* contains no nb\.stage"):
        step(tf.ones((4, 2)))


def test_stage_with_two_replica_counts_is_refused() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.replica(2), nb.stage(cluster="c0"):
            y = x * 2.0
        with nb.replica(3), nb.stage(cluster="c0"):
            return y + 1.0

    with pytest.raises(OptionError, match=r"stage 'c0' is in nb\.replica\(3\)"):
        step(tf.ones((4, 2)))


def test_failure_in_one_replica_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is raised, even if others, which are notified of it, fail before this notification ends."""
    handle, failures = EmulatedStep._handle_failure, list[BaseException]()

    def handle_slowly(self: EmulatedStep, step: RunningStep, failure: BaseException) -> BaseException:
        cause = handle(self, step, failure)
        failures.append(failure)
        time.sleep(0.5 if len(failures) == 1 else 0.0)
        return cause

    monkeypatch.setattr(EmulatedStep, "_handle_failure", handle_slowly)

    @nb.function
    def step(x: Any) -> Any:
        with nb.replica(2), nb.stage(cluster="c0"):
            y = tf.debugging.assert_less(x, 5.0)
            with tf.control_dependencies([y]):
                y = x * 2.0
        with nb.replica(3), nb.stage(cluster="c1"):
            return y + 1.0

    with nb.init(links=LINE):
        assert float(tf.reduce_sum(step(tf.ones((6, 1))))) == 18.0
        with pytest.raises(nb.errors.StageFailedError, match="stage 'c0'"):
            step(tf.range(6.0)[:, None] * 2.0)
        assert float(tf.reduce_sum(step(tf.ones((6, 1))))) == 18.0


def test_outer_pipeline_gives_the_plan_of_inner_pipelines() -> None:
    """It is the same plan as the same pipeline in each replica."""
    keras.backend.clear_session(free_memory=False)  # the digest has the variables' names
    inside = nb.plan(model((3, 2), 6), X, Y)
    keras.backend.clear_session(free_memory=False)
    plan = nb.plan(model((3, 2), 6, around=True), X, Y)
    assert plan.digest == inside.digest
    assert ([stage.replicas for stage in plan.stages.values()], plan.micro_batch) == ([3, 2], 6)


@pytest.mark.grid
def test_replicated_pipeline_trains_like_the_uncut_model() -> None:
    """Case 4 of Whale's training: data parallelism of the pipeline of a cluster."""
    expected = train_uncut()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    with nb.cluster(), nb.replica(2), nb.pipeline(4):
        with nb.stage(name="front"):
            hidden = keras.layers.Dense(16, activation="tanh")(inputs)
        with nb.stage(name="back"):
            outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.0)(hidden))
        made = keras.Model(inputs, outputs)
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0), "mse", metrics=["mae"])
        losses, weights = train(made)
    close(losses, expected[0])
    close(weights, expected[1])
    assert losses[1] < losses[0]
