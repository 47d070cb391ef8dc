"""Synchronized batch normalisation under replicas in one process: the uncut step, or a refusal with a mend."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import assert_same
from tests.processes.batch_normalization import X, Y, build_model, enter_no_scopes, make_scopes, train_model
from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.cut import Cut, Fragment, Worker
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.replicas import BATCH_SUM_NOTE, check_replica_sums, find_replica_sums
from whale_nebula.runtime.replicas.collectives import Collectives, Group, ReplicaSums
from whale_nebula.runtime.step.compiled import FunctionBuilder
from whale_nebula.runtime.step.engine import Engine

LINE = "1gbit,0ms"


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What training uncut leaves."""
    return train_model(make_eager(build_model(enter_no_scopes)))


def make_eager(model: keras.Model) -> keras.Model:
    """A few uncut steps are not worth a trace."""
    model.run_eagerly = True
    return model


@pytest.mark.parametrize(
    ("copies", "links"), [pytest.param((2,), None, marks=pytest.mark.grid), ((3, 3), LINE)], ids=str
)
def test_step_equals_the_uncut_step(
    copies: tuple[int, ...], links: str | None, expected: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    with nb.init(links=links):
        assert_same(expected, train_model(build_model(make_scopes(copies))), "normalised")
    assert not [each for each in recwarn if "micro-batches" in str(each.message)], "a batch has too few rows for them"


def catch_refusal(*around: contextlib.AbstractContextManager[Any]) -> BatchCoupledError:
    """How a model inside these scopes is refused."""
    with contextlib.ExitStack() as stack:
        for scope in around:
            stack.enter_context(scope)
        model = build_model(enter_no_scopes)
    with pytest.raises(BatchCoupledError) as caught:
        nb.plan(model, X, Y)
    return caught.value


def test_replicas_with_several_micro_batches_are_refused() -> None:
    error = catch_refusal(nb.replica(2), nb.pipeline(6), nb.stage(name="all"))
    assert "the synchronized moments of BatchNormalization" in error.what
    assert "stage 'all' has 6 micro-batches for 2 replicas" in str(error)
    assert error.mends[0] == "use nb.pipeline(micro_batch=2), one for each replica"
    assert any('coupled="allow"' in mend for mend in error.mends)


def test_pipeline_without_replicas_is_refused() -> None:
    error = catch_refusal(nb.pipeline(4), nb.stage(name="all"))
    assert "has 4 micro-batches for 1 replica" in str(error)
    assert error.mends[:2] == (
        "use nb.replica(4) around stage 'all', so each replica has one micro-batch",
        "nb.pipeline(micro_batch=1)",
    )


def test_stage_with_fewer_replicas_than_micro_batches_is_refused() -> None:
    with pytest.raises(BatchCoupledError, match=r"stage 's1' has 3 micro-batches for 2 replicas"):
        nb.plan(build_model(make_scopes((3, 2))), X, Y)


def test_allowed_coupling_normalizes_each_micro_batch_separately() -> None:
    both = build_model(make_scopes((2,), 4, coupled="allow")), make_eager(build_model(enter_no_scopes))
    found, whole = (float(model.train_on_batch(X, Y)[0]) for model in both)
    assert not any(note.startswith(BATCH_SUM_NOTE) for note in nb.last_report().notes)
    assert abs(found - whole) > 1e-4 * whole


@pytest.mark.grid
def test_allowed_coupling_is_exact_with_one_micro_batch_per_replica() -> None:
    assert nb.verify(build_model(make_scopes((2,), 2, coupled="allow")), X, Y).ok


@pytest.mark.grid
@pytest.mark.parametrize("renorm", [False, True])
def test_layer_used_twice_updates_its_averages_twice(renorm: bool) -> None:
    inputs, norm = keras.Input((8,)), keras.layers.BatchNormalization(synchronized=True, renorm=renorm)
    with nb.replica(2):
        hidden = norm(keras.layers.Dense(6, use_bias=False)(inputs))
        hidden = norm(keras.layers.Dense(6, use_bias=False)(keras.layers.Activation("tanh")(hidden)))
        outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    assert nb.verify(model, X, Y).ok


def test_unequal_workers_have_one_micro_batch_each() -> None:
    workers = [{"address": "127.0.0.1:7001"}, {"address": "127.0.0.1:7002", "speed": 3}]
    with nb.init({"clusters": {"c0": {"workers": workers}}}):
        plan = nb.plan(build_model(make_scopes((2,))), X, Y)
    assert plan.rows == (16, 15) and not any("slowest" in note for note in plan.to_text().splitlines())


def test_fix_of_plain_batch_normalization_is_synchronized() -> None:
    inputs = keras.Input((8,))
    with nb.replica(2):
        outputs = keras.layers.BatchNormalization()(keras.layers.Dense(3)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with pytest.raises(BatchCoupledError) as caught:
        nb.plan(model, X, Y)
    assert any("synchronized=True" in mend for mend in caught.value.mends)


def test_masked_layer_is_refused() -> None:
    inputs = keras.Input((5, 3))
    with nb.replica(2):
        hidden = keras.layers.Dense(3)(keras.layers.Masking()(inputs))
        outputs = keras.layers.BatchNormalization(synchronized=True)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with pytest.raises(BatchCoupledError):
        nb.plan(model, np.ones((4, 5, 3), "float32"), np.ones((4, 5, 3), "float32"))


@pytest.fixture
def engine() -> Engine:
    """A captured step whose two replicas add up on the way."""
    weight = tf.Variable(tf.random.stateless_normal((8, 3), [1, 2]))
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.build((None, 3))

    @nb.function
    def step(x: Any) -> Any:
        with nb.replica(2), nb.stage(cluster="c0"), tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x @ weight, training=True) - 0.5) ** 2)
        return loss, tape.gradient(loss, weight)

    step(X)
    found = step._step.last
    assert found is not None
    return found


def test_collectives_replace_sums_without_consumers(engine: Engine) -> None:
    group = Group(Collectives(0, ("127.0.0.1:1",), 1.0), (0,), "alone")
    sums = ReplicaSums(engine.cut, {0: group}, 1, engine.worker)
    fragment = find_summing_fragment(engine)
    assert len(sums.list_ops(fragment)) == 2  # one forward, one for its gradient
    plain, summed = (FunctionBuilder(engine.captured.graph, sums=each).build(fragment) for each in (None, sums))
    assert plain.waits is None and summed.waits is not None
    marks = [op for op in summed.concrete.graph.get_operations() if "replica_sum" in op.name]
    assert len(marks) == 2 and not any(op.outputs[0].consumers() for op in marks)
    sums.sum_zeros(fragment)


def cut_for_workers(engine: Engine, *workers: str) -> Cut:
    """The plan of the step where these are processes."""
    return cut_program(engine.captured.program, [Worker(name, "c0", (0,)) for name in workers])


def test_worker_without_collectives_is_refused(engine: Engine) -> None:
    cut = cut_for_workers(engine, "c0/0", "c0/1")
    check_replica_sums(cut, "c0/0", str, collectives=True)
    check_replica_sums(cut, "c1/0", str, collectives=False)
    with pytest.raises(BatchCoupledError, match=r"call nb.init\(\) before anything that creates a tensor"):
        check_replica_sums(cut, "c0/0", str, collectives=False)


def test_worker_with_two_replicas_is_refused(engine: Engine) -> None:
    assert find_replica_sums(engine.captured.program).keys() == {0}
    with pytest.raises(BatchCoupledError, match=r"which need a worker each, but its cluster has 1"):
        check_replica_sums(cut_for_workers(engine, "c0/0"), "c0/0", str, collectives=True)


def find_summing_fragment(engine: Engine) -> Fragment:
    found = engine.cut.phases[0].stages[0].backward or engine.cut.phases[0].stages[0].forward
    assert found is not None
    return found
