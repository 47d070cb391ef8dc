"""Gradients of looked-up tables: an optimizer gets the slices of the uncut step, however the batch is divided."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.ir.graph import CAPTURE, Graph, Op
from whale_nebula.ir.program import GradientPart, Holder, Leaf, Program, Request, Variable
from whale_nebula.runtime.step.gradients import GradientSums, merge, sum_over_stages
from whale_nebula.spec import Spec, Value

ROWS, LENGTH, WIDTH, TOKENS = 8, 5, 4, 7
IDS = np.random.default_rng(0).integers(0, TOKENS, (ROWS, LENGTH)).astype("int32")
Y = np.random.default_rng(1).random((ROWS, LENGTH, 1)).astype("float32")


class Lookup(keras.layers.Layer):
    """A table, looked up by what `at` makes of the ids."""

    def __init__(self, *at: Callable[[Any], Any]) -> None:
        super().__init__()
        self.at = at

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(TOKENS, WIDTH), name="table")

    def call(self, ids: Any) -> Any:
        return sum((tf.gather(self.table, at(ids)) for at in self.at), 0.1 * tf.cast(ids, tf.float32)[..., None])


def positions(ids: Any) -> Any:
    return tf.range(tf.shape(ids)[1])


def fixed_positions(ids: Any) -> Any:
    return tf.range(LENGTH)


def tokens(ids: Any) -> Any:
    return ids


def shifted_tokens(ids: Any) -> Any:
    return tf.cast((ids + 1) % TOKENS, tf.int64)


def token_sum(ids: Any) -> Any:
    return (tf.reduce_sum(ids) % TOKENS)[None]


def branched_positions(ids: Any) -> Any:
    return tf.cond(tf.shape(ids)[1] > 2, lambda: positions(ids) + 1, lambda: positions(ids))


LOOKUPS = {
    "positions": (positions,),
    "fixed positions": (fixed_positions,),
    "tokens": (tokens,),
    "tokens and positions": (tokens, positions),
    "tokens twice": (tokens, shifted_tokens),
    "a branch": (branched_positions,),
    "chosen by all": (token_sum,),
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "clipped adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
}
CUTS = {"micro-batches": (4, 1), "replicas": (2, 2), "uneven": (3, 1)}


def train(lookup: str, optimizer: str, cut: str = "", stages: int = 1) -> tuple[list[Any], list[Any]]:
    """Losses, and weights and slots, after a few steps."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    micro_batch, copies = CUTS.get(cut, (1, 1))

    def scope(kind: Callable[..., Any], *options: Any, **named: Any) -> contextlib.AbstractContextManager[Any]:
        return kind(*options, **named) if cut else contextlib.nullcontext()

    table, tied, dense = Lookup(*LOOKUPS[lookup]), stages == 3, keras.layers.Dense(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    with scope(nb.cluster), scope(nb.replica, copies), scope(nb.pipeline, micro_batch):
        with scope(nb.stage, name="front"):
            hidden = table(inputs)
        with scope(nb.stage, name="back") if stages > 1 else contextlib.nullcontext():
            hidden = hidden + table(inputs) if tied else hidden
            outputs = dense(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(OPTIMIZERS[optimizer](), "mse", run_eagerly=not cut)
    losses = [model.train_on_batch(IDS, Y) for _ in range(2)]
    return losses, [each.numpy() for each in (*model.weights, *model.optimizer.variables)]


ALL = list(itertools.product(LOOKUPS, OPTIMIZERS, CUTS, (1, 2, 3)))
SAMPLE = {
    ("fixed positions", "clipped adam", "replicas", 3),
}


@pytest.mark.parametrize(
    ("lookup", "optimizer", "cut", "stages"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.grid) for case in ALL],
)
def test_weights_and_slots_equal_those_of_the_uncut_step(lookup: str, optimizer: str, cut: str, stages: int) -> None:
    losses, state = train(lookup, optimizer, "", stages)
    found_losses, found = train(lookup, optimizer, cut, stages)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    for ours, theirs in zip(found, state, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "lookup", [pytest.param("positions", marks=pytest.mark.grid), "tokens and positions", "chosen by all"]
)
def test_gradient_slices_equal_those_of_the_uncut_step(lookup: str) -> None:
    table = Lookup(*LOOKUPS[lookup])
    table.build(None)

    def step(ids: Any, scope: Callable[..., Any] = contextlib.nullcontext) -> Any:
        with tf.GradientTape() as tape, scope():
            loss = tf.reduce_sum(table(ids) ** 2)
        gradient = tape.gradient(loss, table.table.value)
        return gradient.values, gradient.indices

    values, indices = step(tf.constant(IDS))
    with nb.pipeline(micro_batch=4):
        found = nb.function(lambda ids: step(ids, lambda: nb.stage(name="front")))(tf.constant(IDS))
    np.testing.assert_allclose(found[0], values, rtol=1e-5)
    np.testing.assert_array_equal(found[1], indices)


# -------------------- Merging of micro-batches' values and gradients
SHARES = [tf.constant(0.75), tf.constant(0.25)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("mean", [2.5]), ("sum", [6.0]), ("last", [4.0]), ("same", [2.0]), ("concat:0", [2.0, 4.0])],
)
def test_merge_rules(rule: str, expected: list[float]) -> None:
    assert merge(rule, [tf.constant([2.0]), tf.constant([4.0])], SHARES).numpy().tolist() == expected


def test_vector_rule_merges_each_entry_by_its_own_rule() -> None:
    shapes = [tf.constant([3, 4, 6]), tf.constant([1, 4, 2])]
    assert merge("vector:sum,same,sum", shapes, SHARES).numpy().tolist() == [4, 4, 8]


def test_merge_returns_the_tensor_of_one_micro_batch_unchanged() -> None:
    only = tf.constant(3.0)
    assert merge("mean", [only], [tf.constant(0.5)]) is only


def make_program(sparse: bool = False) -> Program:
    """A request of the gradient of one variable (2 x 3) by two stages."""
    spec = Spec("float32", (2, 3))
    ops = (
        Op(0, "Placeholder", outputs=(Spec("resource", ()),), role=CAPTURE),
        Op(1, "Placeholder", outputs=(spec,)),
        Op(2, "Placeholder", outputs=(Spec("int32", (None,)),)),
    )
    values = (Value(1, 0), Value(2, 0)) if sparse else (Value(1, 0),)
    leaves = (Leaf(2, "ids", Spec("int32", (None,))),)
    request = Request(0, 3, frozenset(), (), ("v",), (0,), (Holder(0, values),))
    return Program(Graph(ops), leaves, variables=(Variable(0, "v", spec),), requests=(request,))


def make_part(stage: int, *values: int) -> GradientPart:
    return GradientPart(stage, 0, tuple(Value(op, 0) for op in values or (1,)))


def test_dense_gradients_are_added_in_stage_order() -> None:
    first, second = GradientSums(make_program()), GradientSums(make_program())
    first.add(0, make_part(0), [tf.fill((2, 3), 1e8)])
    second.add(0, make_part(1), [tf.fill((2, 3), 1.0)])
    second.add(0, make_part(1), [tf.fill((2, 3), -1e8)])
    found = sum_over_stages(make_program(), {**second.parts(), **first.parts()})
    assert found[Value(1, 0)].numpy().max() == 0.0  # 1e8 + (1 - 1e8), and in no other order


def test_dense_and_sparse_gradients_of_a_tied_variable_are_added() -> None:
    dense, sparse = GradientSums(make_program()), GradientSums(make_program())
    dense.add(0, make_part(1), [tf.ones((2, 3))])
    sparse.add(0, make_part(0, 1, 2), [tf.ones((2, 3)), tf.constant([1, 1])])
    found = sum_over_stages(make_program(), {**dense.parts(), **sparse.parts()})
    assert found[Value(1, 0)].numpy().tolist() == [[1.0] * 3, [3.0] * 3]
