"""1-bit Adam and LAMB: equal, step by step, to an independent implementation of both for two and three workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import OptionError
from whale_nebula.runtime.run import current_run
from whale_nebula.strategies import OneBitAdam, OneBitLamb

Array = npt.NDArray[np.float64]
ROWS, WIDTH, HIDDEN, FREEZE, STEPS, RATE = 24, 6, 5, 8, 24, 0.02
DECAY = 0.01
OPTIMIZERS = {"adam": OneBitAdam, "lamb": OneBitLamb}


def draw() -> tuple[Array, Array, list[Array]]:
    """Rows, what is to be learned of them, and the weights of a product of two matrices."""
    random = np.random.default_rng(3)
    x, y = random.normal(size=(ROWS * STEPS, WIDTH)), random.normal(size=(ROWS * STEPS, 2))
    return x, y, [random.normal(size=(WIDTH, HIDDEN)) / 3, random.normal(size=(HIDDEN, 2)) / 3]


class Reference:
    """The algorithms as they are published, in float64: each worker has its rows; nothing of the library is used."""

    def __init__(self, kind: str, workers: int, *, servers: bool = False) -> None:
        self.x, self.y, self.w = draw()
        self.kind, self.workers, self.servers = kind, workers, servers
        self.m, self.v, self.fresh = ([np.zeros_like(each) for each in self.w] for _ in range(3))
        size = sum(each.size for each in self.w)
        self.errors, self.server = [np.zeros(size) for _ in range(workers)], np.zeros(size)
        self.mean, self.last, self.scales = [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]

    def gradients(self, step: int, worker: int) -> list[Array]:
        own = np.array_split(np.arange(step * ROWS, (step + 1) * ROWS), self.workers)[worker]
        x, y, (a, b) = self.x[own], self.y[own], self.w
        off = 2 * (x @ a @ b - y) / y.size
        return [x.T @ off @ b.T, (x @ a).T @ off]

    def sign(self, flat: Array, sizes: Sequence[int]) -> Array:
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return np.concatenate([np.where(p >= 0, 1.0, -1.0) * np.linalg.norm(p) / np.sqrt(p.size) for p in parts])

    def step(self, step: int) -> None:
        beta, local = 0.9, []
        for worker in range(self.workers):
            local.append([beta * m + 0.1 * g for m, g in zip(self.m, self.gradients(step, worker), strict=True)])
        before, sizes = self.m, [each.size for each in self.w]
        if step == FREEZE and self.kind == "lamb":
            roots = [np.linalg.norm(each) / np.sqrt(each.size) for each in self.m]
            self.scales = [float(np.mean(roots) / each) for each in roots]
        if step < FREEZE:
            self.m = [sum(each) / self.workers for each in zip(*local, strict=True)]
        else:
            parts = [sum(sizes)] if self.kind == "lamb" else sizes
            said = []
            for worker, own in enumerate(local):
                flat = np.concatenate([m.ravel() * s for m, s in zip(own, self.scales, strict=True)])
                wanted = flat + self.errors[worker]
                said.append(self.sign(wanted, parts))
                self.errors[worker] = wanted - said[-1]
            mean = sum(said) / self.workers
            if self.servers:
                wanted = mean + self.server
                chunks = [len(each) for n in parts for each in np.array_split(np.zeros(n), self.workers)]
                mean = self.sign(wanted, chunks)
                self.server = wanted - mean
            split = np.split(mean, np.cumsum(sizes)[:-1])
            self.m = [each.reshape(w.shape) / s for each, w, s in zip(split, self.w, self.scales, strict=True)]
        gradients = [(m - beta * old) / 0.1 for m, old in zip(self.m, before, strict=True)]
        for n, gradient in enumerate(gradients):
            self.fresh[n] = 0.999 * self.fresh[n] + 0.001 * gradient**2
            if step < FREEZE:
                self.v[n] = self.fresh[n]
            self.update(n, step)

    def update(self, n: int, step: int) -> None:
        root = np.sqrt(self.v[n]) + 1e-8
        plain = self.m[n] / root
        update = plain + DECAY * self.w[n]
        rate = RATE
        if self.kind == "lamb":
            if step < FREEZE:
                trusted = float(np.clip(np.linalg.norm(self.w[n]) / np.linalg.norm(update), 0.01, 10.0))
                self.mean[n] = 0.9 * self.mean[n] + 0.1 * trusted
            else:
                factor = (root / (np.sqrt(self.fresh[n]) + 1e-8)).max()
                share = min(1.0, np.linalg.norm(plain) / np.linalg.norm(update))
                factor = np.clip(factor * share + 1 - share, 0.5, 4.0)
                self.last[n] = float(np.clip(factor, 0.9 * self.last[n], 1.1 * self.last[n]))
                trusted = self.mean[n] * self.last[n]
            rate *= trusted
        self.w[n] = self.w[n] - rate * update


def train(kind: str, workers: int, *, steps: int = STEPS, **options: Any) -> tuple[list[list[Array]], list[int]]:
    """The weights after each step, of a model that so many clusters train; and the bytes of its steps."""
    nb.shutdown()
    x, y, weights = draw()
    names = [f"c{n}" for n in range(workers)]
    with nb.init({"clusters": {name: {} for name in names}}):
        apart = workers > 1
        with nb.cluster() if apart else nullcontext(), nb.replica(exchange="1bit") if apart else nullcontext():
            inputs = keras.Input((WIDTH,))
            hidden = keras.layers.Dense(HIDDEN, use_bias=False)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(2, use_bias=False)(hidden))
        model.set_weights(weights)
        optimizer = OPTIMIZERS[kind](RATE, freeze_step=FREEZE, weight_decay=DECAY, **options)
        model.compile(optimizer, "mse")
        found, crossed = [], []
        for step in range(steps):
            rows = slice(step * ROWS, (step + 1) * ROWS)
            model.train_on_batch(x[rows], y[rows])
            found.append(model.get_weights())
            crossed.append(sum(link.bytes for link in nb.last_report().links.values()) if workers > 1 else 0)
        if workers > 1:
            for copies in current_run().rounds.copies.kept.values():
                for variable in model.trainable_variables:
                    assert copies[id(variable.value)].numpy().tobytes() == variable.numpy().tobytes()
        return found, crossed


SAMPLE = [("adam", 2, True), ("lamb", 3, False)]
REST = [each for each in itertools.product(OPTIMIZERS, (2, 3), (False, True)) if each not in SAMPLE]


@pytest.mark.parametrize(
    ("kind", "workers", "servers"), [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.grid) for each in REST)]
)
def test_each_step_is_that_of_the_algorithm(kind: str, workers: int, servers: bool) -> None:
    reference = Reference(kind, workers, servers=servers)
    found, _ = train(kind, workers, servers=servers)
    for step, weights in enumerate(found):
        reference.step(step)
        for one, other in zip(weights, reference.w, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")


@pytest.mark.parametrize("kind", ["adam", pytest.param("lamb", marks=pytest.mark.grid)])
def test_alone_it_is_an_optimizer_whose_variance_is_frozen(kind: str) -> None:
    """With one worker nothing crosses, so nothing is compressed."""
    found, _ = train(kind, 1, steps=FREEZE)
    reference = Reference(kind, 1)
    for step, weights in enumerate(found):
        reference.step(step)
        for one, other in zip(weights, reference.w, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_had_no_gradient_in_the_warm_up_stays_as_it_is() -> None:
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
def test_it_is_made_again_from_its_config(kind: type[Any]) -> None:
    optimizer = kind(0.5, 7, weight_decay=0.25, servers=True, beta_1=0.8)
    again = kind.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert (again.freeze_step, again.decay, again.servers, again.beta_1) == (7, 0.25, True, 0.8)


def fit(optimizer: Any, around: Any = None) -> None:
    nb.shutdown()
    squeeze = around or nullcontext()
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster(), squeeze, nb.replica(exchange="1bit"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 1)))


def use_constraint(model: Any) -> None:
    model.compile(OneBitAdam(0.1, freeze_step=9), "mse")
    take_steps(model, 5)


def compile_again(model: Any) -> None:
    """The first optimizer is still there, and has slots of the same weights."""
    first = OneBitAdam(0.1, freeze_step=9)
    model.compile(first, "mse")
    take_steps(model, 3)
    model.compile(OneBitAdam(0.01, freeze_step=9), "mse")
    take_steps(model, 3)
    model.compile(first, "mse")
    take_steps(model, 2)


def freeze_a_layer(model: Any) -> None:
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


def call_for_the_rate(model: Any) -> None:
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
        pytest.param(compile_again, marks=pytest.mark.grid),
        freeze_a_layer,
        write_between_steps,
        pytest.param(call_for_the_rate, marks=pytest.mark.grid),
    ],
)
def test_in_the_warm_up_it_trains_as_one_process_without_it(run: Any) -> None:
    """What else is done to weights, slots and optimizers counts as it does there."""
    found = []
    for apart in (False, True):
        nb.shutdown()
        keras.utils.set_random_seed(1)
        around = nb.replica(exchange="1bit") if apart else nullcontext()
        with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster() if apart else nullcontext(), around:
            limit = keras.constraints.NonNeg() if run is use_constraint else None
            hidden = keras.layers.Dense(3, kernel_constraint=limit)
            model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
            tf.config.run_functions_eagerly(not apart)  # the uncut steps, which are too few to be traced
            try:
                run(model)
            finally:
                tf.config.run_functions_eagerly(False)
            found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_another_optimizer_is_not_taken_for_the_one_before() -> None:
    nb.shutdown()
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster(), nb.replica(exchange="1bit"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        first = OneBitAdam(0.1)
        model.compile(first, "mse")
        take_steps(model, 1)
        model.compile("adam", "mse")
        with pytest.raises(OptionError, match="needs one optimizer that exchanges momenta"):
            take_steps(model, 1)


def test_a_model_that_is_loaded_goes_on_with_its_step_and_its_rate(tmp_path: Path) -> None:
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
        nb.shutdown()
    assert crossed[0] == crossed[1] > 4 * crossed[2] and set(crossed[2:]) == {crossed[2]}
    moved = [np.abs(after - before).max() for before, after in itertools.pairwise(found)]
    assert moved[-1] < 0.5 * moved[4], "the tenth step has a tenth of the first one's rate"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fit("adam"), 'exchange="1bit" needs one optimizer that exchanges momenta'),
        (lambda: nb.replica(exchange="2bit"), "exchange='2bit'"),
        (lambda: nb.replica(exchange="1bit", sync_every=4), "sync_every=4 does not go with exchange='1bit'"),
        (lambda: nb.replica(exchange="1bit", shard="optimizer"), "shard='optimizer' does not go with exchange"),
        (lambda: nb.replica(exchange="1bit", outer="nesterov"), "outer='nesterov' does not go with exchange"),
        (lambda: fit(OneBitAdam(), nb.compress(int8=True)), "momenta that cross by"),
        (lambda: OneBitAdam(freeze_step=0), "freeze_step=0 of one_bit_adam"),
        (lambda: OneBitLamb(beta_2=1.0), "beta_2=1.0 of one_bit_lamb"),
        (lambda: fit(OneBitAdam(clipnorm=1.0)), "clipnorm"),
        (lambda: OneBitAdam(beta_1="much"), "beta_1='much' of one_bit_adam"),
        (lambda: OneBitAdam(epsilon=-1.0), "epsilon=-1.0 of one_bit_adam"),
        (lambda: OneBitLamb(coefficients=(10.0, 0.01)), "coefficients=.* of one_bit_lamb"),
        (lambda: OneBitLamb(factor_change=1), "factor_change=1 of one_bit_lamb"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        make()
    assert caught.value.mend
