"""Experts: compared with a dense reference, their balance and drops, and sharded over devices."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from benchmarks.experts.reference import compute_dense
from tests.parity.split_models import build_sgd
from tests.parity.zoo import fit
from tests.parity_harness import Cut, Outcome, assert_same, data
from whale_nebula.models import SwitchFeedForward

WIDTH, EXPERTS = 6, 4


@pytest.mark.parametrize(
    ("k", "factor", "groups"),
    [
        *[(2, 0.5, None), (1, 0.5, 5), (2, 4.0, 5)],
        *(pytest.param(*each, marks=pytest.mark.grid) for each in ((1, 0.5, None), (2, 0.5, 5), (1, 4.0, 5))),
    ],
)
def test_experts_equal_the_dense_reference(k: int, factor: float, groups: int | None) -> None:
    """With ample room, and with so little that some are left out in their order."""
    keras.utils.set_random_seed(1)
    options: dict[str, Any] = {"min_capacity": 1, "drop": "order", "row_groups": groups}
    layer = SwitchFeedForward(EXPERTS, 8, k=k, capacity_factor=factor, **options)
    x = data(5, 8, WIDTH)
    found = layer(x, training=True)
    expected, dropped = compute_dense(layer, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert float(layer.dropped.result()) == pytest.approx(dropped) and (dropped > 0) == (factor < 1)


@pytest.mark.parametrize("seed", [None, 1])
def test_experts_start_with_different_weights(seed: int | None) -> None:
    """One seed draws the same again: each expert needs one of its own."""
    layer = SwitchFeedForward(EXPERTS, 8, seed=seed)
    layer.build((None, WIDTH))
    for weights in (layer.inner, layer.outer):
        kinds = {np.asarray(each).tobytes() for each in np.asarray(weights)}
        assert len(kinds) == EXPERTS


@pytest.mark.parametrize("groups", [None, 3])
def test_load_balancing_loss_matches_its_formula(groups: int | None) -> None:
    """Experts times the sum of shares by mean probabilities: 1 where all are alike, times the factor; of row groups the
    mean, as of the gauges.
    """
    layer = SwitchFeedForward(EXPERTS, 8, aux=0.5, row_groups=groups)
    x = data(3, 8, WIDTH)
    layer(x)
    chances = np.asarray(tf.nn.softmax(x.reshape(groups or 1, -1, WIDTH) @ layer.gate))
    shares = np.stack([np.bincount(each, minlength=EXPERTS) / len(each) for each in np.argmax(chances, -1)])
    expected = 0.5 * EXPERTS * float(np.mean(np.sum(shares * np.mean(chances, 1), 1)))
    assert float(layer.losses[0]) == pytest.approx(expected, rel=1e-5)
    entropies = -np.sum(shares * np.log(np.maximum(shares, 1e-9)), 1) / np.log(EXPERTS)
    assert float(layer.balance.result()) == pytest.approx(entropies.mean())
    assert float(layer.busiest.result()) == pytest.approx(shares.max(1).mean())


@pytest.mark.grid
@pytest.mark.parametrize("groups", [None, 2])
def test_micro_batched_experts_equal_row_groups(groups: int | None, tmp_path: Path) -> None:
    """Also of a layer that reads the inputs themselves. TensorBoard has what `fit` tells."""
    keras.utils.set_random_seed(4)
    options: dict[str, Any] = {"capacity_factor": 0.6, "min_capacity": 1, "drop": "order", "aux": 0.1}
    layer, twin = (SwitchFeedForward(EXPERTS, 8, row_groups=n, **options) for n in (groups, (groups or 1) * 3))
    x, inputs = data(12, 7, WIDTH), keras.Input((7, WIDTH))
    with nb.cluster(), nb.pipeline(3, coupled="allow"), nb.stage(), nb.split(2, axis=0):
        model = keras.Model(inputs, layer(inputs))
    twin.build(x.shape)
    twin.set_weights(layer.get_weights())
    model.compile("sgd", "mse")
    expected = {"loss": float(tf.reduce_mean((twin(x) - x) ** 2) + twin.losses[0])}
    expected |= {gauge.name: float(gauge.result()) for gauge in twin.metrics}
    assert expected["share_dropped"] > 0
    with nb.init(tensorboard=tmp_path):
        history = model.fit(x, x, batch_size=12, shuffle=False, verbose=0).history
    assert history == {name: [pytest.approx(value, rel=1e-5)] for name, value in expected.items()}
    (written,) = tmp_path.glob("events.out.tfevents.*")
    values = [value for event in tf.compat.v1.train.summary_iterator(str(written)) for value in event.summary.value]
    tensorboard_values = {value.tag.rpartition("/")[2]: float(tf.make_ndarray(value.tensor)) for value in values}
    assert {name: tensorboard_values[name] for name in history} == {name: value for name, (value,) in history.items()}


def test_tokens_choose_experts_of_one_group() -> None:
    layer = SwitchFeedForward(EXPERTS, 8, groups=2, k=2)
    layer.build((None, WIDTH))
    chances = layer.score(tf.constant(data(1, 9, WIDTH)), 9, training=False)
    halves = np.asarray(chances).reshape(9, 2, 2).sum(-1)
    assert ((halves > 0).sum(-1) == 1).all()


def test_dropped_tokens_are_random_only_in_training() -> None:
    keras.utils.set_random_seed(2)
    layer = SwitchFeedForward(2, 8, capacity_factor=0.5, min_capacity=1)
    x = np.ones((1, 12, WIDTH), "float32")
    last = [np.flatnonzero(np.abs(np.asarray(layer(x, training=mode))).sum(-1)[0]) for mode in (True, True, False)]
    assert last[2].tolist() == [0, 1, 2]
    assert any(kept.tolist() != [0, 1, 2] for kept in last[:2])
    assert all(len(kept) == 3 for kept in last)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 3}, "k=3"),
        ({"groups": 3}, "into 3 groups"),
        ({"drop": "first"}, "drop='first'"),
        ({"row_groups": 0}, "row_groups=0"),
    ],
)
def test_invalid_expert_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(nb.errors.OptionError, match=said):
        SwitchFeedForward(EXPERTS, 8, **options)


def test_indivisible_row_groups_are_refused() -> None:
    with pytest.raises(nb.errors.OptionError, match="a batch of 5 rows is not divisible by row_groups=2"):
        SwitchFeedForward(EXPERTS, 8, row_groups=2)(data(5, 8, WIDTH))


def train(cut: Cut, count: int, groups: int | None) -> Outcome:
    """A small model with experts, spread over devices or not."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((7, WIDTH))
    with cut.program():
        with cut.at(0), nb.split(count, axis=0) if count else contextlib.nullcontext():
            options: dict[str, Any] = {"noise": 0.1, "groups": 2, "seed": 1, "row_groups": groups}
            hidden = inputs + SwitchFeedForward(EXPERTS, 8, k=2, capacity_factor=0.6, **options)(inputs)
        with cut.at(1):
            outputs = keras.layers.Dense(2)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(build_sgd(global_clipnorm=0.5), "mse", metrics=["mae"])
    return fit(model, cut, data(18, 7, WIDTH), data(18, 7, 2, seed=1), batch_size=6)


@pytest.mark.grid
@pytest.mark.parametrize(("count", "groups"), [(2, None), (3, 6)])
def test_experts_on_several_devices_equal_one_device(count: int, groups: int | None) -> None:
    """Those of tests/parity/test_splits.py are in every run."""
    expected = train(Cut(0), 0, groups)
    nb.shutdown()
    assert_same(expected, train(Cut(2), count, groups), "sums", 1e-2 * 6)


def test_split_experts_use_four_all_to_alls() -> None:
    """By two all-to-alls, and their gradients by as many."""
    layer, x = SwitchFeedForward(EXPERTS, 256, row_groups=2), data(4, 8, WIDTH)
    layer.build((None, 8, WIDTH))
    scale = tf.Variable(tf.ones([WIDTH]))

    def step(x: Any) -> Any:
        with nb.cluster(), tf.GradientTape() as tape:
            given = x * scale
            with nb.split(2, axis=0):
                found = layer(given, training=True)
            loss = tf.reduce_mean(tf.square(found))
        return tape.gradient(loss, scale), loss

    kinds = [each.kind for each in nb.plan(nb.function(step), x).collectives]
    assert kinds.count("all-to-all") == 4


def test_experts_are_restored_from_config() -> None:
    layer = SwitchFeedForward(EXPERTS, 8, k=2, groups=2, noise=0.1)
    assert SwitchFeedForward.from_config(layer.get_config()).get_config() == layer.get_config()
