"""A tf.function that a step calls is inlined in the thread that traces, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.patches import STATE, apply_tracing_patches
from whale_nebula.errors import BatchCoupledError, BoundaryInBodyError, NebulaError

ROWS = np.ones((4, 2), "float32")


def sine(x: Any) -> Any:
    return tf.sin(x)


def count_calls(step: Any, *args: Any) -> int:
    """The calls that are left in a captured step."""
    program = step.step.plan(*step.arguments(*args)).cut.program
    return sum(op.type.endswith("PartitionedCall") for op in program.graph.ops)


def wrap_in_stage(inner: Any) -> Any:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return inner(x)

    return step


def test_called_tf_function_is_inlined() -> None:
    assert count_calls(wrap_in_stage(tf.function(sine)), tf.constant(ROWS)) == 0


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"experimental_implements": "tests.own"}])
def test_tf_function_with_attributes_is_not_inlined(options: dict[str, Any]) -> None:
    assert count_calls(wrap_in_stage(tf.function(sine, **options)), tf.constant(ROWS)) == 1


def test_tf_function_called_in_a_loop_stays_in_the_body() -> None:
    inner = tf.function(sine)
    found = wrap_in_stage(lambda x: tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, inner(v)), [0, x])[1])
    np.testing.assert_allclose(found(tf.constant(ROWS)), np.sin(np.sin(ROWS)), rtol=1e-6)


def test_tf_function_in_another_thread_is_not_inlined() -> None:
    inner, found = tf.function(sine), []
    with apply_tracing_patches():
        thread = threading.Thread(target=lambda: found.append(float(inner(0.0))))
        thread.start()
        thread.join(timeout=30)
    assert found == [0.0]
    assert inner.experimental_get_tracing_count() == 1


def test_scope_in_a_concrete_function_is_refused() -> None:
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
DRAWN_ROWS = np.ones((8, 16), "float32")
Noise = Callable[[Any], Any]


def drop_randomly(rows: Any) -> Any:
    return tf.nn.dropout(rows, 0.5, seed=4)


def add_noise(rows: Any) -> Any:
    return rows + tf.random.normal(tf.shape(rows), seed=3)


def make_step_body(noise: Noise, micro_batch: int) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        with nb.pipeline(micro_batch):
            with nb.stage(cluster="a"):
                h = x * 2.0
            with nb.stage(cluster="b"):
                return noise(h)

    return step


def run_steps(noise: Noise, micro_batch: int, links: str | None = None) -> list[Any]:
    """Three steps; the second has fewer rows."""
    nb.init(links=links)
    step = nb.function(make_step_body(noise, micro_batch))
    found = [step(tf.constant(DRAWN_ROWS[:rows])).numpy() for rows in (8, 5, 8)]
    nb.shutdown()
    return found


def split_parts(rows: Any) -> set[bytes]:
    return {part.tobytes() for part in np.split(rows, 4)}


def test_draws_outside_a_step_use_the_stateful_kernel() -> None:
    def drawn() -> list[str]:
        graph = tf.function(lambda: tf.random.normal([2], seed=1)).get_concrete_function().graph
        return [op.type for op in graph.get_operations() if op.op_def.is_stateful]

    with apply_tracing_patches():
        assert drawn() == ["RandomStandardNormal"]  # no step is traced in this thread
    assert drawn() == ["RandomStandardNormal"]


@pytest.mark.parametrize("noise", [drop_randomly, add_noise])
def test_draws_differ_by_micro_batch_and_are_equal_in_every_runner(noise: Noise) -> None:
    local = run_steps(noise, 4)
    assert len(split_parts(local[0])) == len(split_parts(local[2])) == 4
    assert not np.array_equal(local[0], local[2])
    for one, other in zip(local, run_steps(noise, 4, links="10gbit,0ms"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_draws_with_one_micro_batch_equal_the_uncut_step() -> None:
    uncut = tf.function(lambda x: add_noise(x * 2.0), input_signature=[tf.TensorSpec([None, 16])])
    for rows, found in zip((8, 5, 8), run_steps(add_noise, 1), strict=True):
        np.testing.assert_array_equal(found, uncut(tf.constant(DRAWN_ROWS[:rows])))


def test_failed_step_restores_the_draw_counter() -> None:
    def checked(rows: Any) -> Any:
        drawn = add_noise(rows)
        tf.debugging.assert_less(rows, 9.0)
        return drawn

    step, again = nb.function(make_step_body(checked, 4)), nb.function(make_step_body(checked, 4))
    first, second = step(tf.constant(DRAWN_ROWS)), step(tf.constant(DRAWN_ROWS))
    np.testing.assert_array_equal(again(tf.constant(DRAWN_ROWS)), first)
    with pytest.raises(NebulaError, match="NB-301"):
        again(tf.constant(9.0 * DRAWN_ROWS))
    np.testing.assert_array_equal(again(tf.constant(DRAWN_ROWS)), second)


def test_draw_counter_is_a_variable_named_by_its_seeds() -> None:
    step = nb.function(make_step_body(drop_randomly, 4))
    program = step.step.plan(*step.arguments(tf.constant(DRAWN_ROWS))).cut.program
    (path,) = (variable.path for variable in program.variables)
    assert f"/{STATE}_" in path and path.endswith("_4")


def test_unsupported_draws_with_micro_batches_are_refused() -> None:
    def picked(rows: Any) -> Any:
        return tf.random.categorical(tf.zeros_like(rows), 3, seed=1)

    def in_a_body(rows: Any) -> Any:
        return tf.while_loop(lambda n, _: n < 2, lambda n, r: (n + 1, drop_randomly(r)), [0, rows])[1]

    for noise in (picked, in_a_body):
        assert len(run_steps(noise, 1)) == 3
        with pytest.raises(BatchCoupledError, match=r"(?s)the seed is the same.*SeedGenerator") as caught:
            run_steps(noise, 4)
        nb.shutdown()
        assert "test_patches.py" in caught.value.where


def test_scalar_draw_is_the_same_for_all_micro_batches() -> None:
    found = run_steps(lambda rows: rows * tf.random.uniform([], seed=5), 4)
    assert [len(np.unique(each)) for each in found] == [1, 1, 1]
    assert found[0][0, 0] != found[2][0, 0]
