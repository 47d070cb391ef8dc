"""An independent implementation of 1-bit Adam and LAMB, and the model and the rows that it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from whale_nebula.strategies import OneBitAdam, OneBitLamb

Array = npt.NDArray[np.float64]
ROWS, WIDTH, HIDDEN, FREEZE, STEPS, RATE = 24, 6, 5, 8, 24, 0.02
DECAY = 0.01
OPTIMIZERS = {"adam": OneBitAdam, "lamb": OneBitLamb}


def draw_problem() -> tuple[Array, Array, list[Array]]:
    """Rows, their targets, and the weights of a product of two matrices."""
    random = np.random.default_rng(3)
    x, y = random.normal(size=(ROWS * STEPS, WIDTH)), random.normal(size=(ROWS * STEPS, 2))
    return x, y, [random.normal(size=(WIDTH, HIDDEN)) / 3, random.normal(size=(HIDDEN, 2)) / 3]


class Reference:
    """The published algorithms in float64, without the library: each of the `workers` has its rows. With `servers` the
    mean is compressed again by parts; `roots` as in `OneBitLamb`.
    """

    def __init__(self, kind: str, workers: int, *, servers: bool = False, roots: bool = True) -> None:
        self.x, self.y, self.w = draw_problem()
        self.kind, self.workers, self.servers, self.roots = kind, workers, servers, roots
        self.m, self.v, self.new_variances = ([np.zeros_like(each) for each in self.w] for _ in range(3))
        size = sum(each.size for each in self.w)
        self.errors, self.server = [np.zeros(size) for _ in range(workers)], np.zeros(size)
        self.mean, self.last, self.scales = [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]

    def compute_gradients(self, step: int, worker: int) -> list[Array]:
        own = np.array_split(np.arange(step * ROWS, (step + 1) * ROWS), self.workers)[worker]
        x, y, (a, b) = self.x[own], self.y[own], self.w
        off = 2 * (x @ a @ b - y) / y.size
        return [x.T @ off @ b.T, (x @ a).T @ off]

    def compress_to_signs(self, flat: Array, sizes: Sequence[int]) -> Array:
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return np.concatenate([np.where(p >= 0, 1.0, -1.0) * np.linalg.norm(p) / np.sqrt(p.size) for p in parts])

    def step(self, step: int) -> None:
        beta, local = 0.9, []
        for worker in range(self.workers):
            gradients = self.compute_gradients(step, worker)
            local.append([beta * m + 0.1 * g for m, g in zip(self.m, gradients, strict=True)])
        before, sizes = self.m, [each.size for each in self.w]
        if step == FREEZE and self.kind == "lamb":
            roots = [np.linalg.norm(each) / np.sqrt(each.size) for each in self.m]
            self.scales = [float(np.mean(roots) / each) for each in roots]
        if step < FREEZE:
            self.m = [sum(each) / self.workers for each in zip(*local, strict=True)]
        else:
            parts = [sum(sizes)] if self.kind == "lamb" else sizes
            sent_signs = []
            for worker, own in enumerate(local):
                flat = np.concatenate([m.ravel() * s for m, s in zip(own, self.scales, strict=True)])
                target = flat + self.errors[worker]
                sent_signs.append(self.compress_to_signs(target, parts))
                self.errors[worker] = target - sent_signs[-1]
            mean = sum(sent_signs) / self.workers
            if self.servers:
                target = mean + self.server
                chunks = [len(each) for n in parts for each in np.array_split(np.zeros(n), self.workers)]
                mean = self.compress_to_signs(target, chunks)
                self.server = target - mean
            split = np.split(mean, np.cumsum(sizes)[:-1])
            self.m = [each.reshape(w.shape) / s for each, w, s in zip(split, self.w, self.scales, strict=True)]
        gradients = [(m - beta * old) / 0.1 for m, old in zip(self.m, before, strict=True)]
        for n, gradient in enumerate(gradients):
            self.new_variances[n] = 0.999 * self.new_variances[n] + 0.001 * gradient**2
            if step < FREEZE:
                self.v[n] = self.new_variances[n]
            self.update_weight(n, step)

    def update_weight(self, n: int, step: int) -> None:
        root = np.sqrt(self.v[n]) + 1e-8
        plain = self.m[n] / root
        update = plain + DECAY * self.w[n]
        rate = RATE
        if self.kind == "lamb":
            if step < FREEZE:
                trust_ratio = float(np.clip(np.linalg.norm(self.w[n]) / np.linalg.norm(update), 0.01, 10.0))
                self.mean[n] = 0.9 * self.mean[n] + 0.1 * trust_ratio
            else:
                factor = (root / (np.sqrt(self.new_variances[n]) + 1e-8)).max() ** (1 if self.roots else 2)
                share = min(1.0, np.linalg.norm(plain) / np.linalg.norm(update))
                factor = np.clip(factor * share + 1 - share, 0.5, 4.0)
                self.last[n] = float(np.clip(factor, 0.9 * self.last[n], 1.1 * self.last[n]))
                trust_ratio = self.mean[n] * self.last[n]
            rate *= trust_ratio
        self.w[n] = self.w[n] - rate * update


def build_model(kind: str, **options: Any) -> keras.Model:
    """The model of the reference, with its initial weights, in the scopes around the call."""
    inputs = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(HIDDEN, use_bias=False)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, use_bias=False)(hidden))
    model.set_weights(draw_problem()[2])
    model.compile(OPTIMIZERS[kind](RATE, freeze_step=FREEZE, weight_decay=DECAY, **options), "mse")
    return model


def read_rows(step: int) -> tuple[Array, Array]:
    """The batch of a step."""
    x, y, _ = draw_problem()
    own = slice(step * ROWS, (step + 1) * ROWS)
    return x[own], y[own]


def check_steps(kind: str, workers: int, found: Sequence[Sequence[Any]], **options: bool) -> None:
    """Compare the weights after each step with those of the reference."""
    reference = Reference(kind, workers, **options)
    for step, weights in enumerate(found):
        reference.step(step)
        for one, other in zip(weights, reference.w, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
