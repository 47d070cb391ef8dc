"""Gradients: TensorFlow's own, its tapes, `tf.gradients` and its vectorizer."""

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.contract.tracing import record_calls, trace_graph
from whale_nebula.tf import gradients
from whale_nebula.tf import private as tf_private


def test_differentiate_stops_at_the_given_tensors() -> None:
    def step(x: Any) -> Any:
        y = tf.sin(x)
        (found,) = gradients.differentiate([y * x], [x], [2.0 * tf.ones_like(y)], [y])
        return found

    np.testing.assert_allclose(tf.function(step)(tf.constant([0.5])), 2.0 * np.sin([0.5]), rtol=1e-6)
    assert gradients.differentiate([], [], [], []) == []


def test_differentiate_accepts_handles_and_returns_all_kinds() -> None:
    """A variable's captured handle is a source; None, dense and IndexedSlices come out as they are."""
    table, kernel, unused = tf.Variable(tf.ones((3, 2))), tf.Variable(tf.ones((2, 2))), tf.Variable(1.0)
    kinds: list[Any] = []

    def step(ids: Any) -> Any:
        y = tf.gather(table, ids) @ kernel + 0.0 * tf.stop_gradient(unused)
        inner = {id(e): i for e, i in tf.compat.v1.get_default_graph().captures}
        sources = [inner[id(v.handle)] for v in (table, kernel, unused)]
        kinds.extend(map(type, gradients.differentiate([y], sources, [tf.ones_like(y)], [])))
        return y

    trace_graph(step, tf.TensorSpec([None], tf.int32))
    assert kinds[0] is tf.IndexedSlices and issubclass(kinds[1], tf.Tensor) and kinds[2] is type(None)


def test_is_tape_recording_while_any_tape_is_open() -> None:
    assert not tf_private.is_tape_recording()
    with tf.GradientTape() as tape:
        assert tf_private.is_tape_recording()
        with tape.stop_recording():
            assert not tf_private.is_tape_recording()
    assert not tf_private.is_tape_recording()


def test_stop_tape_ends_recording_of_a_plain_tape_only() -> None:
    """What `gradient` does when it is called inside its own block."""
    with tf.GradientTape() as tape:
        tf_private.stop_tape(tape)
        assert not tf_private.is_tape_recording()
    with tf.GradientTape(persistent=True) as tape:
        tf_private.stop_tape(tape)
        assert tf_private.is_tape_recording()


def test_is_tape_open_until_finish_tape() -> None:
    x = tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape:
        pass
    tf_private.finish_tape(tape)
    assert tf_private.is_tape_open(tape)
    with tf.GradientTape() as tape:
        y = x * x
    assert tf_private.is_tape_open(tape)
    tf_private.finish_tape(tape)
    assert not tf_private.is_tape_open(tape)
    assert [v is x for v in tape.watched_variables()] == [True]
    with pytest.raises(RuntimeError, match="non-persistent"):
        tape.gradient(y, x)


def test_reopen_tape_finds_tensors_traced_by_a_closed_tape() -> None:
    x, other = tf.Variable([1.0]), tf.Variable([1.0])
    asked: dict[str, bool] = {}

    def step() -> Any:
        before = tf.sin(other)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            inside, unwatched = tf.sin(x), tf.cos(other)
            stopped = tf.stop_gradient(inside)
        after = tf.tan(inside)
        with tf_private.reopen_tape(tape) as followed:
            tensors = {"inside": inside, "unwatched": unwatched, "before": before, "after": after, "stop": stopped}
            asked.update({name: followed(tensor) for name, tensor in tensors.items()})
        if tf_private.is_tape_recording():
            raise AssertionError("the tape was left open")
        return inside

    trace_graph(step)
    assert asked == {"inside": True, "unwatched": False, "before": False, "after": False, "stop": False}


def test_parallel_for_vectorizes_in_the_calling_graph() -> None:
    """A body's ops are made in the graph around it, and then others in their place: we must keep out of both."""
    with record_calls(tf_private.parallel_for, "_pfor_impl") as met, tf.Graph().as_default() as graph:
        tf.vectorized_map(lambda row: 2.0 * row, tf.ones([2, 3]))
    assert [where for *_, where in met] == [graph]


def test_patch_gradients_covers_tf_gradients_and_v1_optimizers() -> None:
    heard: list[tuple[int, int]] = []

    def asked(targets: Any, sources: Any, seeds: Any, stops: Any, unconnected: Any) -> None:
        heard.append((len(targets) if isinstance(targets, list) else 1, len(sources)))

    variable = tf.Variable(2.0)

    def step() -> Any:
        loss = variable**2
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        pairs = optimizer.compute_gradients(loss, [variable])
        return tf.gradients([loss, loss], [variable])[0], pairs[0][0]

    with gradients.patch_gradients(asked).apply():
        twice, once = tf.function(step, autograph=False)()
    assert sorted(heard) == [(1, 1), (2, 1)]
    assert (float(twice), float(once)) == (8.0, 4.0)


def test_patch_gradients_omits_bodies_of_loops_and_conds() -> None:
    """The gradients of a loop or a cond are TensorFlow's own matter: it says which graph they are about."""
    heard: list[Any] = []
    with gradients.patch_gradients(lambda *options: heard.append(options)).apply():

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * x), [0, x])[1]
                y = tf.cond(y > 1.0, lambda: y * x, lambda: y)
            return tape.gradient(y, x)

        assert float(tf.function(step, autograph=False)(tf.constant(2.0))) == 80.0
    assert heard == []


def test_is_in_custom_gradient_is_true_inside_a_traced_one() -> None:
    """The frame of TensorFlow's decorator stands on the stack while the function under it runs."""
    found: list[bool] = []

    @tf.custom_gradient
    def twice(x: Any) -> Any:
        found.append(tf_private.is_in_custom_gradient())
        return 2.0 * x, lambda upstream: 2.0 * upstream

    def step(x: Any) -> Any:
        found.append(tf_private.is_in_custom_gradient())
        return twice(x)

    tf.function(step).get_concrete_function(tf.TensorSpec([2]))
    assert found == [False, True]


def test_stop_recording_stops_open_tapes() -> None:
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        with tf_private.stop_recording():
            hidden = x * x
            assert not tf_private.is_tape_recording()
        y = hidden * x
    assert float(tape.gradient(y, x)) == 1.0


def test_is_followed_by_tape_for_results_of_watched_tensors() -> None:
    x, other = tf.Variable(1.0), tf.constant(1.0)
    assert not tf_private.is_followed_by_tape(x * x)
    with tf.GradientTape():
        assert tf_private.is_followed_by_tape(x * x)
        assert not tf_private.is_followed_by_tape(other * other)


def test_record_on_tapes_reports_requested_sources() -> None:
    x, given, head, result = tf.Variable(1.0), tf.constant(2.0), tf.Variable(3.0), tf.constant(4.0)
    requests: list[frozenset[int] | None] = []
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(given)
        tf_private.record_on_tapes([x], [given], [result], requests.append)
        y = result * head
    assert tape.gradient(y, [x, given]) == [None, None]
    assert float(tape.gradient(y, head)) == 4.0
    assert requests == [frozenset({id(x.handle), id(given)}), frozenset({id(head.handle)})]
    assert tape.gradient(head * 2.0, x) is None
    assert len(requests) == 2, "nothing goes back through it"
    assert {variable.ref() for variable in tape.watched_variables()} == {x.ref(), head.ref()}


def test_differentiate_names_gradients_like_a_tape() -> None:
    """Sums have the terms of those of a tape, with the same names (tests/unit/capture/test_gradient_order.py: bits)."""
    terms: list[list[str]] = []

    def step(x: Any) -> Any:
        scopes: dict[str, str] = {}
        record = gradients.patch_records(lambda outputs: scopes.update({outputs[0].op.name: get_name_scope()}))
        get_name_scope = gradients.get_name_scope
        with tf.GradientTape() as tape, record.apply():
            tape.watch(x)
            mean = tf.reduce_mean(x)
            y = x * mean + tf.square(x - tf.stop_gradient(mean))
        operations = tf.compat.v1.get_default_graph().get_operations()
        order = gradients.TapeOrder({op: -number for number, op in enumerate(operations)}, scopes)
        found = gradients.differentiate([y], [x], [tf.ones_like(y)], [], order)[0]
        found += tape.gradient(y, x)
        sums = (op for op in tf.compat.v1.get_default_graph().get_operations() if op.type == "AddN")
        terms.extend([re.sub(r"_\d+\b", "", term.op.name) for term in op.inputs] for op in sums)
        return found

    trace_graph(step, tf.TensorSpec([None], tf.float32))
    own, tapes = terms[: len(terms) // 2], terms[len(terms) // 2 :]
    assert len(own) > 0 and [sorted(each) for each in own] == [sorted(each) for each in tapes]


def test_patch_records_hears_of_ops_only_while_a_tape_is_open() -> None:
    heard: list[str] = []

    def step(x: Any) -> Any:
        with gradients.patch_records(lambda outputs: heard.append(outputs[0].op.type)).apply():
            x = tf.sin(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                x = tf.exp(x)
        return x

    trace_graph(step, tf.TensorSpec([], tf.float32))
    assert heard == ["Exp"]


def test_get_name_scope_is_that_of_the_current_graph() -> None:
    found: list[str] = []

    def step() -> None:
        with tf.name_scope("outer"), tf.name_scope("inner"):
            found.append(gradients.get_name_scope())
        found.append(gradients.get_name_scope())

    trace_graph(step)
    assert found == ["outer/inner", ""]
