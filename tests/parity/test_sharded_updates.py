"""`nb.replica(shard=...)`: sharded updates equal whole ones, for every kind of update."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import whale_nebula as nb
from tests.parity.zoo import fit
from tests.parity_harness import Cut, Outcome, assert_same, data
from whale_nebula.ir.cut import Worker
from whale_nebula.passes.pipeline import cut_program

RATE = 1e-2
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "plain": lambda: optimizers.SGD(RATE),
    "sgd": lambda: optimizers.SGD(RATE, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(RATE, epsilon=1e-3),
    "adamw": lambda: optimizers.AdamW(RATE, epsilon=1e-3, weight_decay=0.01, global_clipnorm=0.5, use_ema=True),
    "lamb": lambda: optimizers.Lamb(RATE, epsilon=1e-3),
    "adafactor": lambda: optimizers.Adafactor(RATE),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(RATE, epsilon=1e-3)),
}
"""Element-wise, with a global norm, with a norm of each weight, with factors of rows and columns, in a condition."""


class GradientNormModel(keras.Model):
    """A model that returns the norm of its gradients."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}


def build_model(name: str, replicas: int, shard: str) -> tuple[keras.Model, Any]:
    """A model and its inputs: a table and two dense layers for "rows", else the layers alone, for "stages" one in each:
    then the replicas of the first have the norm of all gradients in unlike rounds.
    """
    keras.utils.set_random_seed(3)
    inputs = keras.Input((7,), dtype="int32" if name == "rows" else None)
    layers = [keras.layers.Dense(10, activation="gelu"), keras.layers.Dense(3)]
    with contextlib.ExitStack() as scopes:
        if replicas:
            scopes.enter_context(nb.cluster())
        if replicas and name != "stages":
            scopes.enter_context(nb.replica(replicas, shard=shard))
        hidden = keras.layers.Flatten()(keras.layers.Embedding(11, 4)(inputs)) if name == "rows" else inputs
        for number, layer in enumerate(layers):
            with contextlib.ExitStack() as inner:
                if replicas and name == "stages":
                    inner.enter_context(nb.replica(1) if number else nb.replica(replicas, shard=shard))
                    inner.enter_context(nb.stage(name=f"s{number}"))
                hidden = layer(hidden)
    model = GradientNormModel(inputs, hidden)
    model.compile(OPTIMIZERS[{"rows": "adam", "stages": "adamw"}.get(name, name)](), "mse")
    if not replicas:
        model.optimizer.build(model.trainable_variables)  # otherwise TensorFlow traces the step twice
    return model, np.random.default_rng(2).integers(0, 11, (17, 7)) if name == "rows" else data(17, 7)


def train(name: str, replicas: int, shard: str = "optimizer") -> Outcome:
    """Two epochs, whose last batch has one row."""
    model, x = build_model(name, replicas, shard)
    return fit(model, Cut(0), x, data(17, 3, seed=1), batch_size=8)


SAMPLE = [("rows", 3, "optimizer"), ("plain", 2, "gradients")]
CASES = list(itertools.product([*OPTIMIZERS, "rows", "stages"], (2, 3), ("optimizer", "gradients")))
"""With three replicas, parts have different sizes. `adamw` is also trained in `tests/processes/test_splits.py`."""


@pytest.mark.parametrize(
    ("name", "replicas", "shard"),
    [pytest.param(*case, marks=() if case in SAMPLE else (pytest.mark.grid,)) for case in CASES],
)
def test_sharded_updates_equal_whole_ones(name: str, replicas: int, shard: str) -> None:
    expected = train(name, 0)
    nb.shutdown()
    assert_same(expected, train(name, replicas, shard), "sums", RATE * 6)


def test_plan_lists_sharded_bytes() -> None:
    """Of Adam's moments a half, of the weights all: 3 n becomes 2 n."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.replica(2, shard="optimizer"):
        outputs = keras.layers.Dense(16)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    plan = nb.plan(model, data(8, 8), data(8, 16))
    (stage,) = plan.stages.values()
    assert stage.shard_bytes == 2 * 4 * (8 * 16 + 16)
    assert stage.slot_bytes == 2 * 4 * (8 * 16 + 16) // 2
    assert {each.kind for each in plan.collectives} == {"reduce-scatter", "all-gather"}
    assert sum(each.bytes for each in plan.collectives) == 2 * 4 * (8 * 16 + 16) // 2


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("adamw", "gradients"),
        pytest.param("lamb", "optimizer", marks=pytest.mark.grid),
        *(pytest.param(*each, marks=pytest.mark.grid) for each in (("adam", "optimizer"), ("plain", "gradients"))),
    ],
)
def test_sharding_sends_as_many_bytes_as_an_all_reduce(name: str, shard: str) -> None:
    """Three quarters of the weights' bytes there, and as many back, within a hundredth; norms are in it."""
    sizes = (60, 200, 40)
    inputs = keras.Input((sizes[0],))
    with nb.cluster(), nb.replica(4, shard=shard):
        outputs = keras.layers.Dense(sizes[2])(keras.layers.Dense(sizes[1])(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(OPTIMIZERS[name](), "mse")
    plan = nb.plan(model, data(8, sizes[0]), data(8, sizes[2]))
    there = 0.75 * 4 * sum((before + 1) * size for before, size in itertools.pairwise(sizes))
    kinds = Counter[str]()
    for each in plan.collectives:
        kinds[each.kind] += each.bytes * each.times
    assert kinds["reduce-scatter"] == pytest.approx(there, rel=0.01)
    assert kinds["all-gather"] == pytest.approx(there, rel=0.01)
    assert sum(kinds.values()) == pytest.approx(2 * there, rel=0.01)


def test_plan_notes_values_that_stay_whole() -> None:
    model, x = build_model("rows", 2, "gradients")
    plan = nb.plan(model, x, data(17, 3, seed=1))
    (note,) = (note for note in plan.notes if "all-reduced" in note)
    path = model.trainable_variables[0].path
    assert note == f"the gradient of {path} is all-reduced completely: replicas exchange the rows that they have read"
    model, x = build_model("scaled", 2, "optimizer")
    plan = nb.plan(model, x, data(17, 3, seed=1))
    assert "8 slots are not sharded: If needs each one completely" in plan.notes and not plan.layouts


def test_gradients_of_unlike_updates_stay_whole() -> None:
    """A worker that also has the second stage knows the norm of all gradients before the other one: a collective in its
    update would wait for the other worker, which waits for the norm.
    """
    layers, optimizer = [keras.layers.Dense(10), keras.layers.Dense(3)], optimizers.Adam(RATE, global_clipnorm=0.5)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), tf.GradientTape() as tape:
            with nb.replica(2, shard="optimizer"), nb.stage(cluster="c", name="front"):
                hidden = layers[0](x)
            with nb.replica(1), nb.stage(cluster="c", name="back"):
                loss = tf.reduce_mean(layers[1](hidden) ** 2)
        weights = [weight for layer in layers for weight in layer.trainable_variables]
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    step(data(8, 7))
    assert step._step.last is not None
    program = step._step.last.captured.program
    pieces = {}
    for first in ((0,), (0, 1)):
        workers = [Worker("c/0", "c", first), Worker("c/1", "c", (0,)), Worker("c/2", "c", (1,))][: 4 - len(first)]
        cut = cut_program(program, workers)
        pieces[first] = [each.kind for each in cut.layouts[0].variables.values()]
        pieces[first] += [each.kind for each in cut.layouts[0].sums]
        assert any("its replicas run different updates" in note for note in cut.notes) is (first == (0, 1))
    assert pieces == {(0,): ["split"] * 4 + ["reduce-scatter"] * 2, (0, 1): ["all-reduce"] * 2}
