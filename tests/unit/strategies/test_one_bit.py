"""1-bit Adam and LAMB: equal, step by step, to an independent implementation, for clusters and workers of one."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.momenta import FREEZE, OPTIMIZERS, STEPS, Array, build_model, check_steps, read_rows
from whale_nebula.errors import OptionError
from whale_nebula.runtime.run import current_run
from whale_nebula.strategies import OneBitAdam, OneBitLamb


def train(
    kind: str, workers: int, *, steps: int = STEPS, inside: bool = False, **options: Any
) -> tuple[list[list[Array]], list[int]]:
    """The weights after each step, of a model that so many clusters train, or workers of one and its bytes."""
    nb.shutdown()
    replicated, count = workers > 1, [workers] * inside
    with nb.init({"clusters": {f"c{n}": {} for n in range(1 if inside else workers)}}):
        with (
            nb.cluster() if replicated else nullcontext(),
            nb.replica(*count, exchange="1bit") if replicated else nullcontext(),
        ):
            model = build_model(kind, **options)
        found, crossed = [], []
        for step in range(steps):
            model.train_on_batch(*read_rows(step))
            found.append(model.get_weights())
            crossed.append(sum(link.bytes for link in nb.last_report().links.values()) if workers > 1 else 0)
        if workers > 1:
            for copies in current_run().rounds.copies.copies_by_cluster.values():
                for variable in model.trainable_variables:
                    assert copies[id(variable.value)].numpy().tobytes() == variable.numpy().tobytes()
        return found, crossed


SAMPLE = [("adam", 2, True, False), ("lamb", 3, False, True)]
EVERY = itertools.product(OPTIMIZERS, (2, 3), (False, True), (False, True))


@pytest.mark.parametrize(
    ("kind", "workers", "servers", "inside"),
    [pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.grid) for each in EVERY],
)
def test_one_bit_step_equals_the_reference_implementation(kind: str, workers: int, servers: bool, inside: bool) -> None:
    found, _ = train(kind, workers, servers=servers, inside=inside)
    check_steps(kind, workers, found, servers=servers)


@pytest.mark.grid
def test_lamb_factor_by_variances_equals_the_reference_implementation() -> None:
    found, _ = train("lamb", 2, roots=False)
    check_steps("lamb", 2, found, roots=False)


@pytest.mark.parametrize("kind", ["adam", pytest.param("lamb", marks=pytest.mark.grid)])
def test_one_bit_optimizer_with_one_worker_freezes_its_variance(kind: str) -> None:
    """With one worker nothing crosses, so nothing is compressed."""
    found, _ = train(kind, 1, steps=FREEZE)
    check_steps(kind, 1, found)


def test_rows_without_warm_up_gradient_stay_unchanged() -> None:
    """A row of an embedding that never came has no variance, and would get the sign of nothing."""
    nb.shutdown()
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}):
        with nb.cluster(), nb.replica(exchange="1bit"):
            inputs = keras.Input((2,), dtype="int32")
            words = keras.layers.Embedding(8, 4)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(words)))
        model.compile(OneBitAdam(0.01, freeze_step=3), "mse")
        before = model.layers[1].get_weights()[0]
        for _ in range(9):
            model.train_on_batch(np.array([[1, 2], [3, 1]]), np.ones((2, 1)))
        after = model.layers[1].get_weights()[0]
    assert sorted(set(np.argwhere((before != after).any(1)).ravel())) == [1, 2, 3]


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_one_bit_optimizer_is_restored_from_config(kind: type[Any]) -> None:
    optimizer = kind(0.5, 7, weight_decay=0.25, servers=True, beta_1=0.8)
    restored = kind.from_config(optimizer.get_config())
    assert restored.get_config() == optimizer.get_config()
    assert (restored.freeze_step, restored.decay, restored.servers, restored.beta_1) == (7, 0.25, True, 0.8)


def fit(optimizer: Any, around: Any = None) -> None:
    nb.shutdown()
    codec_scope = around or nullcontext()
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster(), codec_scope, nb.replica(exchange="1bit"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 1)))


def use_constraint(model: Any) -> None:
    model.compile(OneBitAdam(0.1, freeze_step=9), "mse")
    take_steps(model, 5)


def recompile(model: Any) -> None:
    """The first optimizer is still there, and has slots of the same weights."""
    first = OneBitAdam(0.1, freeze_step=9)
    model.compile(first, "mse")
    take_steps(model, 3)
    model.compile(OneBitAdam(0.01, freeze_step=9), "mse")
    take_steps(model, 3)
    model.compile(first, "mse")
    take_steps(model, 2)


def freeze_layer(model: Any) -> None:
    model.layers[0].trainable = False
    model.compile(OneBitAdam(0.1, freeze_step=9), "mse")
    take_steps(model, 2)
    model.layers[0].trainable = True
    model.compile(OneBitAdam(0.1, freeze_step=9), "mse")
    take_steps(model, 3)


def write_between_steps(model: Any) -> None:
    model.compile(OneBitAdam(0.1, freeze_step=9), "mse")
    take_steps(model, 2)
    model.layers[0].kernel.assign(0.5 * model.layers[0].kernel)
    for slot in model.optimizer.variables[2:4]:
        slot.assign(2.0 * slot)
    take_steps(model, 2)


def use_callable_rate(model: Any) -> None:
    model.compile(OneBitAdam(lambda: 0.1, freeze_step=9), "mse")
    take_steps(model, 3)


def take_steps(model: Any, count: int) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 4)), random.normal(size=(8, 1))
    for _ in range(count):
        model.train_on_batch(x, y)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(use_constraint, marks=pytest.mark.grid),
        pytest.param(recompile, marks=pytest.mark.grid),
        freeze_layer,
        write_between_steps,
        pytest.param(use_callable_rate, marks=pytest.mark.grid),
    ],
)
def test_warm_up_trains_like_one_uncut_process(run: Any) -> None:
    """What else is done to weights, slots and optimizers counts as it does there."""
    found = []
    for replicated in (False, True):
        nb.shutdown()
        keras.utils.set_random_seed(1)
        around = nb.replica(exchange="1bit") if replicated else nullcontext()
        with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster() if replicated else nullcontext(), around:
            limit = keras.constraints.NonNeg() if run is use_constraint else None
            hidden = keras.layers.Dense(3, kernel_constraint=limit)
            model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
            tf.config.run_functions_eagerly(not replicated)  # the uncut steps, which are too few to be traced
            try:
                run(model)
            finally:
                tf.config.run_functions_eagerly(False)
            found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_replacing_the_one_bit_optimizer_is_refused() -> None:
    nb.shutdown()
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster(), nb.replica(exchange="1bit"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        first = OneBitAdam(0.1)
        model.compile(first, "mse")
        take_steps(model, 1)
        model.compile("adam", "mse")
        with pytest.raises(OptionError, match="needs one optimizer that exchanges momenta"):
            take_steps(model, 1)


def test_restored_model_continues_its_step_and_learning_rate(tmp_path: Path) -> None:
    """So it does not warm up again, and a schedule goes on."""
    nb.shutdown()
    rate = keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.0)
    crossed, found = [], []
    for fresh in (True, False):
        with nb.init({"clusters": {"gpu": {}, "npu": {}}}):
            with nb.cluster(), nb.replica(exchange="1bit"), nb.stage():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, name="dense")], name="net")
            model.compile(OneBitAdam(rate, freeze_step=2), "mse")
            if not fresh:
                nb.restore(tmp_path / "saved", model)
            for _ in range(5):
                model.train_on_batch(np.ones((4, 4)), np.ones((4, 64)))
                crossed.append(nb.last_report().links["gpu->npu"].bytes)
                found.append(model.get_weights()[0])
            if fresh:
                nb.save(tmp_path / "saved", model)
            assert nb.last_report().links["gpu->npu"].raw_bytes == 4 * model.count_params()
        nb.shutdown()
    assert crossed[0] == crossed[1] > 4 * crossed[2] and set(crossed[2:]) == {crossed[2]}
    moved = [np.abs(after - before).max() for before, after in itertools.pairwise(found)]
    assert moved[-1] < 0.5 * moved[4], "the tenth step has a tenth of the first one's rate"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fit("adam"), 'exchange="1bit" needs one optimizer that exchanges momenta'),
        (lambda: nb.replica(exchange="2bit"), "exchange='2bit'"),
        (lambda: nb.replica(exchange="1bit", sync_every=4), "sync_every=4 cannot be combined with exchange='1bit'"),
        (lambda: nb.replica(exchange="1bit", shard="optimizer"), "shard='optimizer' cannot be combined with exchange"),
        (lambda: nb.replica(exchange="1bit", outer="nesterov"), "outer='nesterov' cannot be combined with exchange"),
        (lambda: fit(OneBitAdam(), nb.compress(int8=True)), "around momenta that cross"),
        (lambda: OneBitAdam(freeze_step=0), "freeze_step=0 of one_bit_adam"),
        (lambda: OneBitLamb(beta_2=1.0), "beta_2=1.0 of one_bit_lamb"),
        (lambda: fit(OneBitAdam(clipnorm=1.0)), "clipnorm"),
        (lambda: OneBitAdam(beta_1="much"), "beta_1='much' of one_bit_adam"),
        (lambda: OneBitAdam(epsilon=-1.0), "epsilon=-1.0 of one_bit_adam"),
        (lambda: OneBitLamb(coefficients=(10.0, 0.01)), "coefficients=.* of one_bit_lamb"),
        (lambda: OneBitLamb(factor_change=1), "factor_change=1 of one_bit_lamb"),
    ],
)
def test_invalid_one_bit_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        make()
    assert caught.value.mend
