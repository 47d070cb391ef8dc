"""Experts: beside a dense reference, their balance and drops, and spread over devices."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity.zoo import fit, optimizer
from tests.same import Cut, Outcome, assert_same, data
from whale_nebula.models import SwitchFeedForward

WIDTH, EXPERTS = 6, 4


def reference(layer: SwitchFeedForward, x: np.ndarray, k: int, capacity: int) -> np.ndarray:
    """Token by token, the best experts that have room, first choices first."""
    gate, inner, inner_bias, outer, outer_bias = (
        np.asarray(each) for each in (layer.gate, layer.inner, layer.inner_bias, layer.outer, layer.outer_bias)
    )
    tokens = x.reshape(-1, x.shape[-1])
    chances = np.exp(tokens @ gate)
    chances /= chances.sum(-1, keepdims=True)
    best = np.argsort(-chances, -1)[:, :k]
    weights = np.take_along_axis(chances, best, -1)
    weights = weights / weights.sum(-1, keepdims=True) if k > 1 else weights
    found, room = np.zeros_like(tokens), [capacity] * layer.experts
    for choice in range(k):
        for number, token in enumerate(tokens):
            expert = best[number, choice]
            if room[expert]:
                room[expert] -= 1
                hidden = np.maximum(token @ inner[expert] + inner_bias[expert], 0)
                found[number] += weights[number, choice] * (hidden @ outer[expert] + outer_bias[expert])
    return found.reshape(x.shape)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_tokens_get_what_their_experts_make_of_them(k: int, factor: float) -> None:
    """With ample room, and with so little that some are left out in their order."""
    keras.utils.set_random_seed(1)
    layer = SwitchFeedForward(EXPERTS, 8, k=k, capacity_factor=factor, min_capacity=1, drop="order")
    x = data(5, 8, WIDTH)
    found = layer(x, training=True)
    capacity = int(np.ceil(40 / EXPERTS * k * factor))
    np.testing.assert_allclose(found, reference(layer, x, k, capacity), rtol=1e-4, atol=1e-6)
    assert (float(layer.dropped.result()) > 0) == (factor < 1)


@pytest.mark.parametrize("seed", [None, 1])
def test_experts_begin_unlike(seed: int | None) -> None:
    """One seed draws the same again: each expert needs one of its own."""
    layer = SwitchFeedForward(EXPERTS, 8, seed=seed)
    layer.build((None, WIDTH))
    for weights in (layer.inner, layer.outer):
        kinds = {np.asarray(each).tobytes() for each in np.asarray(weights)}
        assert len(kinds) == EXPERTS


def test_the_loss_is_least_where_the_load_is_even() -> None:
    """Experts times the sum of shares by mean probabilities: 1 where all are alike, times the factor."""
    layer = SwitchFeedForward(EXPERTS, 8, aux=0.5)
    x = data(3, 8, WIDTH)
    layer(x)
    chances = tf.nn.softmax(x.reshape(-1, WIDTH) @ layer.gate)
    shares = np.bincount(np.argmax(chances, -1), minlength=EXPERTS) / 24
    expected = 0.5 * EXPERTS * float(np.sum(shares * np.mean(chances, 0)))
    assert float(layer.losses[0]) == pytest.approx(expected, rel=1e-5)
    assert float(layer.busiest.result()) == pytest.approx(shares.max())


def test_of_groups_one_is_chosen_first() -> None:
    layer = SwitchFeedForward(EXPERTS, 8, groups=2, k=2)
    chances = layer.score(tf.constant(data(9, WIDTH)), training=False) if layer.build((None, WIDTH)) is None else None
    halves = np.asarray(chances).reshape(9, 2, 2).sum(-1)
    assert ((halves > 0).sum(-1) == 1).all()


def test_who_is_left_out_is_drawn_while_training() -> None:
    keras.utils.set_random_seed(2)
    layer = SwitchFeedForward(2, 8, capacity_factor=0.5, min_capacity=1)
    x = np.ones((1, 12, WIDTH), "float32")
    last = [np.flatnonzero(np.abs(np.asarray(layer(x, training=mode))).sum(-1)[0]) for mode in (True, True, False)]
    assert last[2].tolist() == [0, 1, 2]
    assert any(kept.tolist() != [0, 1, 2] for kept in last[:2])
    assert all(len(kept) == 3 for kept in last)


@pytest.mark.parametrize(
    ("options", "said"), [({"k": 3}, "k=3"), ({"groups": 3}, "in 3 groups"), ({"drop": "first"}, "drop='first'")]
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(nb.errors.OptionError, match=said):
        SwitchFeedForward(EXPERTS, 8, **options)


def train(cut: Cut, count: int) -> Outcome:
    """A small model with experts, spread over devices or not."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((7, WIDTH))
    with cut.program():
        with cut.at(0), nb.split(count, axis=0) if count else contextlib.nullcontext():
            hidden = inputs + SwitchFeedForward(EXPERTS, 8, k=2, capacity_factor=0.6, seed=1)(inputs)
        with cut.at(1):
            outputs = keras.layers.Dense(2)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer(global_clipnorm=0.5), "mse", metrics=["mae"])
    return fit(model, cut, data(18, 7, WIDTH), data(18, 7, 2, seed=1), batch_size=6)


@pytest.mark.parametrize("count", [2, 3])
def test_experts_on_several_devices_are_those_of_one(count: int) -> None:
    expected = train(Cut(0), 0)
    nb.shutdown()
    assert_same(expected, train(Cut(2), count), "sums", 1e-2 * 6)


def test_a_layer_is_made_again_from_its_config() -> None:
    layer = SwitchFeedForward(EXPERTS, 8, k=2, groups=2, noise=0.1)
    assert SwitchFeedForward.from_config(layer.get_config()).get_config() == layer.get_config()
