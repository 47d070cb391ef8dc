"""Scopes that are left in unusual ways: by exceptions, out of order, by generators, in other threads, after a fork; and
Ctrl-C in the middle of a step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import (
    build_functional,
    build_subclassed,
    check_error,
    find_marked_line,
    fit,
    make_batch,
    make_two_stage_step,
)
from whale_nebula.errors import NestingError, StateError
from whale_nebula.scopes import hints
from whale_nebula.scopes.frames import open_frames
from whale_nebula.tf import private as tf_private

layers = keras.layers


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test did, no scope is open after it, and nothing of Keras is hooked."""
    monkeypatch.setattr(hints, "find_code_kind", lambda: None)  # that eager code runs uncut is another story
    hooked = tf_private.KerasNode.__init__
    yield
    assert open_frames() == ()
    assert tf_private.KerasNode.__init__ is hooked


def test_exception_in_a_step_leaves_no_scope_open() -> None:
    broken = [True]

    def second(x: Any) -> Any:
        if broken[0]:
            raise RuntimeError("mine")
        return x + 1.0

    step = make_two_stage_step(lambda x: x * 2.0, second)
    with pytest.raises(RuntimeError, match="mine"):
        step(tf.ones([2]))
    assert open_frames() == ()
    assert tf.GradientTape.gradient.__module__.startswith("tensorflow")
    broken[0] = False
    assert step(tf.ones([2])).numpy().tolist() == [3.0, 3.0]


def test_scope_closed_too_early_is_refused_and_closed() -> None:
    outer, inner = nb.cluster(), nb.stage(cluster="b")
    outer.__enter__()
    inner.__enter__()  # mark: inner
    said = ("while another scope is open inside it", find_marked_line("inner"))
    check_error(NestingError, lambda: outer.__exit__(None, None, None), *said, at=__file__)
    assert open_frames() == ()
    inner.__exit__(None, None, None)
    with nb.cluster(), nb.stage(cluster="a"):
        assert len(open_frames()) == 2


def test_scope_held_open_by_a_generator_is_reported() -> None:
    def batches() -> Iterator[int]:
        with nb.stage(cluster="a"):  # mark: generator
            yield 1

    generator = batches()
    next(generator)

    def enter() -> None:
        with nb.stage(cluster="b"):
            pass

    check_error(
        NestingError, enter, "is still open", "a suspended generator", find_marked_line("generator"), at=__file__
    )
    generator.close()
    enter()


@pytest.mark.parametrize(
    ("make", "call"),
    [(build_functional, fit), (lambda: make_two_stage_step(lambda x: x), lambda step: step(tf.ones([2])))],
)
def test_step_with_stages_inside_a_stage_is_refused(make: Callable[[], Any], call: Callable[[Any], Any]) -> None:
    step = make()
    with nb.stage(cluster="b", name="last"):  # mark: not dedented
        said = (f"is called inside nb.stage at {find_marked_line('not dedented')}", "dedent the call of fit")
        check_error(NestingError, lambda: call(step), *said, at="error_checks.py")


def test_scopes_of_an_exhausted_generator_are_closed() -> None:
    def places() -> Iterator[None]:
        for cluster in ("a", "b"):
            with nb.stage(cluster=cluster):
                yield

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            for _ in places():
                x = x * 2.0
        return x

    assert step(tf.ones([2])).numpy().tolist() == [4.0, 4.0]
    assert list(nb.last_report().stages) == ["a", "b"]


def test_scope_is_open_in_its_own_thread_only() -> None:
    with ThreadPoolExecutor(1) as pool, nb.cluster(), nb.stage(cluster="a"):
        assert pool.submit(open_frames).result() == ()
        other = nb.stage(cluster="b")
        pool.submit(other.__enter__).result()
        check_error(NestingError, lambda: other.__exit__(None, None, None), "a different context", at=__file__)
        pool.submit(other.__exit__, None, None, None).result()
        assert pool.submit(open_frames).result() == ()


def run_in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run works at the same time, as far as they can be."""
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], Any]) -> Any:
        barrier.wait(30.0)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(240.0) for future in [pool.submit(start, work) for work in works]]


def test_models_built_in_two_threads_keep_their_scopes() -> None:
    for model in run_in_threads(*[build_functional] * 2):
        assert sorted(nb.plan(model, *make_batch()).stages) == ["a", "b"]


def test_models_trained_in_two_threads_learn_as_alone() -> None:
    models = [
        build_subclassed(),
        build_functional(micro=2),
        build_subclassed(scoped=False),
        build_functional(scoped=False),
    ]
    histories = run_in_threads(*[lambda model=model: fit(model, rows=24) for model in models])
    for cut, uncut in ((0, 2), (1, 3)):
        np.testing.assert_allclose(histories[cut]["loss"], histories[uncut]["loss"], rtol=2e-5)
        for one, other in zip(models[cut].get_weights(), models[uncut].get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_step_called_by_two_threads_runs_one_at_a_time() -> None:
    total = tf.Variable(0.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                x = x * 2.0
            with nb.stage(cluster="b"):
                added = tf.reduce_sum(x)
        total.assign_add(added)
        return added

    run_in_threads(*[lambda: [step(tf.ones([2])) for _ in range(5)]] * 3)
    assert float(total) == 3 * 5 * 4.0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_step_in_a_forked_process_is_refused() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            return x * 2.0

    x = tf.ones([2])
    step(x)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of TensorFlow's may run here: its threads are not copied
        try:
            step(x)
        except StateError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert "NB-305 this process was forked" in text
    assert __file__ in text
    assert 'get_context("spawn")' in text
    assert step(x).numpy().tolist() == [2.0, 2.0], "the first process goes on"


EMULATED = "1gbit,0ms"


def raise_interrupt() -> None:
    """What Ctrl-C does, at this moment: the main thread gets a KeyboardInterrupt as soon as it runs Python."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupt_if_armed(x: Any, armed: list[bool]) -> Any:
    def python(value: Any) -> Any:
        if armed[0]:
            armed[0] = False
            raise_interrupt()
        return value

    return tf.ensure_shape(tf.py_function(python, [x], tf.float32), x.shape)


def make_interrupted_step(where: str, armed: list[bool]) -> tuple[Any, list[tf.Variable]]:
    """A training step that is interrupted in its forward or between the two halves of its update."""
    weights = [tf.Variable(tf.eye(4) * number) for number in (1.0, 2.0)]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = x @ weights[0]
                hidden = interrupt_if_armed(hidden, armed) if where == "forward" else hidden
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean((hidden @ weights[1]) ** 2)
        gradients = tape.gradient(loss, weights)
        weights[0].assign_sub(0.01 * gradients[0])
        late = interrupt_if_armed(gradients[1], armed) if where == "update" else gradients[1]
        weights[1].assign_sub(0.01 * late)
        return loss

    return step, weights


@pytest.mark.parametrize("links", [pytest.param(None, marks=pytest.mark.grid), EMULATED])
@pytest.mark.parametrize("where", ["forward", "update"])
def test_interrupted_step_leaves_consistent_variables(where: str, links: str | None) -> None:
    if links is not None:
        nb.init(links=links)
    x = tf.constant(make_batch()[0])
    armed = [False]
    step, weights = make_interrupted_step(where, armed)
    step(x)
    before = [weight.numpy() for weight in weights]
    armed[0] = True
    with pytest.raises(KeyboardInterrupt):
        step(x)
    moved = [not np.array_equal(weight.numpy(), was) for weight, was in zip(weights, before, strict=True)]
    assert moved in ([True, True], [False, False]), "one half of an update"
    assert moved == [where == "update"] * 2 or links is None
    losses = [float(step(x)) for _ in range(2)]
    assert losses[1] < losses[0]


def test_keras_continues_after_an_interrupt() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 1:
                raise_interrupt()

    model, twin = build_functional(micro=2), build_functional(scoped=False)
    with pytest.raises(KeyboardInterrupt):
        fit(model, rows=24, callbacks=[Stop()])
    x, y = make_batch(24)
    for start in (0, 8):
        twin.train_on_batch(x[start : start + 8], y[start : start + 8])
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert fit(model)["loss"][0] == pytest.approx(fit(twin)["loss"][0], rel=2e-5)
