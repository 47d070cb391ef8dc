"""A tf.function that a step calls is inlined in the thread that traces, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.patches import STATE, trace_patched
from whale_nebula.errors import BatchCoupledError, BoundaryInBodyError, NebulaError

ROWS = np.ones((4, 2), "float32")


def sine(x: Any) -> Any:
    return tf.sin(x)


def calls(step: Any, *args: Any) -> int:
    """The calls that are left in a captured step."""
    program = step.step.plan(*step.arguments(*args)).cut.program
    return sum(op.type.endswith("PartitionedCall") for op in program.graph.ops)


def around(inner: Any) -> Any:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return inner(x)

    return step


def test_what_is_called_becomes_part_of_the_step() -> None:
    assert calls(around(tf.function(sine)), tf.constant(ROWS)) == 0


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"experimental_implements": "tests.own"}])
def test_what_means_more_than_its_python_stays_a_call(options: dict[str, Any]) -> None:
    assert calls(around(tf.function(sine, **options)), tf.constant(ROWS)) == 1


def test_what_a_loop_calls_stays_in_its_body() -> None:
    inner = tf.function(sine)
    found = around(lambda x: tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, inner(v)), [0, x])[1])
    np.testing.assert_allclose(found(tf.constant(ROWS)), np.sin(np.sin(ROWS)), rtol=1e-6)


def test_another_thread_keeps_its_calls() -> None:
    inner, found = tf.function(sine), []
    with trace_patched():
        thread = threading.Thread(target=lambda: found.append(float(inner(0.0))))
        thread.start()
        thread.join(timeout=30)
    assert found == [0.0]
    assert inner.experimental_get_tracing_count() == 1


def test_a_scope_in_a_concrete_function_is_refused() -> None:
    """It is traced by itself before it is called, so it cannot be run inline."""

    @tf.function
    def inner(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return tf.sin(x)

    @nb.function
    def step(x: Any) -> Any:
        return inner.get_concrete_function(tf.TensorSpec([None, 2]))(x)

    with pytest.raises(BoundaryInBodyError, match=r"nested tf\.function"):
        step(ROWS)


# -------------------- Random ops with a seed draw anew for each micro-batch and each step, and the same in every
DRAWN = np.ones((8, 16), "float32")
Drawn = Callable[[Any], Any]


def dropped(rows: Any) -> Any:
    return tf.nn.dropout(rows, 0.5, seed=4)


def noisy(rows: Any) -> Any:
    return rows + tf.random.normal(tf.shape(rows), seed=3)


def body(noise: Drawn, micro_batch: int) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        with nb.pipeline(micro_batch):
            with nb.stage(cluster="a"):
                h = x * 2.0
            with nb.stage(cluster="b"):
                return noise(h)

    return step


def steps(noise: Drawn, micro_batch: int, links: str | None = None) -> list[Any]:
    """Three steps; the second has fewer rows."""
    nb.init(links=links)
    step = nb.function(body(noise, micro_batch))
    found = [step(tf.constant(DRAWN[:rows])).numpy() for rows in (8, 5, 8)]
    nb.shutdown()
    return found


def parts(rows: Any) -> set[bytes]:
    return {part.tobytes() for part in np.split(rows, 4)}


def test_the_hook_is_on_while_a_step_is_traced() -> None:
    def drawn() -> list[str]:
        graph = tf.function(lambda: tf.random.normal([2], seed=1)).get_concrete_function().graph
        return [op.type for op in graph.get_operations() if op.op_def.is_stateful]

    with trace_patched():
        assert drawn() == ["RandomStandardNormal"]  # no step is traced in this thread
    assert drawn() == ["RandomStandardNormal"]


@pytest.mark.parametrize("noise", [dropped, noisy])
def test_each_micro_batch_and_each_step_draws_anew_alike_in_every_way_to_run(noise: Drawn) -> None:
    local = steps(noise, 4)
    assert len(parts(local[0])) == len(parts(local[2])) == 4
    assert not np.array_equal(local[0], local[2])
    for one, other in zip(local, steps(noise, 4, links="10gbit,0ms"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_micro_batch_draws_what_the_uncut_step_draws() -> None:
    uncut = tf.function(lambda x: noisy(x * 2.0), input_signature=[tf.TensorSpec([None, 16])])
    for rows, found in zip((8, 5, 8), steps(noisy, 1), strict=True):
        np.testing.assert_array_equal(found, uncut(tf.constant(DRAWN[:rows])))


def test_a_step_that_fails_has_drawn_nothing() -> None:
    def checked(rows: Any) -> Any:
        drawn = noisy(rows)
        tf.debugging.assert_less(rows, 9.0)
        return drawn

    step, again = nb.function(body(checked, 4)), nb.function(body(checked, 4))
    first, second = step(tf.constant(DRAWN)), step(tf.constant(DRAWN))
    np.testing.assert_array_equal(again(tf.constant(DRAWN)), first)
    with pytest.raises(NebulaError, match="NB-301"):
        again(tf.constant(9.0 * DRAWN))
    np.testing.assert_array_equal(again(tf.constant(DRAWN)), second)


def test_the_count_is_a_variable_of_the_plan_that_names_its_seeds() -> None:
    step = nb.function(body(dropped, 4))
    program = step.step.plan(*step.arguments(tf.constant(DRAWN))).cut.program
    (path,) = (variable.path for variable in program.variables)
    assert f"/{STATE}_" in path and path.endswith("_4")


def test_what_has_a_kernel_of_its_own_in_each_micro_batch_is_refused() -> None:
    def picked(rows: Any) -> Any:
        return tf.random.categorical(tf.zeros_like(rows), 3, seed=1)

    def in_a_body(rows: Any) -> Any:
        return tf.while_loop(lambda n, _: n < 2, lambda n, r: (n + 1, dropped(r)), [0, rows])[1]

    for noise in (picked, in_a_body):
        assert len(steps(noise, 1)) == 3
        with pytest.raises(BatchCoupledError, match=r"(?s)the seed is the same.*SeedGenerator") as caught:
            steps(noise, 4)
        nb.shutdown()
        assert "test_patches.py" in caught.value.where


def test_a_number_that_is_drawn_once_is_the_same_for_all_rows() -> None:
    found = steps(lambda rows: rows * tf.random.uniform([], seed=5), 4)
    assert [len(np.unique(each)) for each in found] == [1, 1, 1]
    assert found[0][0, 0] != found[2][0, 0]
