"""`nb.replica(shard="optimizer")`: updates on parts of the weights are those of the whole, for every kind of update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import pytest
from keras import optimizers

import whale_nebula as nb
from tests.parity.zoo import fit
from tests.same import Cut, Outcome, assert_same, data

RATE = 1e-2
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(RATE, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(RATE, epsilon=1e-3),
    "adamw": lambda: optimizers.AdamW(RATE, epsilon=1e-3, weight_decay=0.01, global_clipnorm=0.5, use_ema=True),
    "lamb": lambda: optimizers.Lamb(RATE, epsilon=1e-3),
    "adafactor": lambda: optimizers.Adafactor(RATE),
}
"""Element-wise, with a global norm, with a norm of each weight, and with factors of rows and columns."""


def train(name: str, replicas: int) -> Outcome:
    """Two epochs, with a ragged last batch."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((7,))
    with contextlib.ExitStack() as scopes:
        if replicas:
            scopes.enter_context(nb.cluster())
            scopes.enter_context(nb.replica(replicas, shard="optimizer"))
        outputs = keras.layers.Dense(3)(keras.layers.Dense(10, activation="gelu")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(OPTIMIZERS[name](), "mse", metrics=["mae"])
    return fit(model, Cut(0), data(20, 7), data(20, 3, seed=1), batch_size=8)


ODD = [pytest.param(name, 3, marks=() if name == "adamw" else (pytest.mark.grid,)) for name in OPTIMIZERS]
"""Parts that are not alike."""


@pytest.mark.parametrize(("name", "replicas"), [*((name, 2) for name in OPTIMIZERS), *ODD])
def test_slots_in_parts_make_the_same_updates(name: str, replicas: int) -> None:
    expected = train(name, 0)
    nb.shutdown()
    assert_same(expected, train(name, replicas), "sums", RATE * 6)


def test_a_plan_tells_what_a_replica_holds() -> None:
    """Of Adam's moments a half, of the weights all: 3 n becomes 2 n."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.replica(2, shard="optimizer"):
        outputs = keras.layers.Dense(16)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    plan = nb.plan(model, data(8, 8), data(8, 16))
    (stage,) = plan.stages.values()
    assert stage.shard_bytes == 2 * 4 * (8 * 16 + 16)
    assert {each.kind for each in plan.collectives} == {"all-gather"}
    assert sum(each.bytes for each in plan.collectives) == 4 * (8 * 16 + 16) // 2


def test_gradients_in_parts_are_not_built() -> None:
    with nb.cluster(), pytest.raises(nb.errors.NotYetError, match="gradients"), nb.replica(2, shard="gradients"):
        pass
