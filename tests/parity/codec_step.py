"""A small step of two stages with any codec at its boundary: its results, and the bytes that crossed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data

ROWS, LENGTH, WIDTH = 7, 4, 24
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"fp16": True, "backward": None},
    "bf16": {"bf16": True, "backward": "bf16", "zstd": True},
    "int8": {"int8": True},
    "int4": {"int4": True, "backward": "int4"},
    "svd": {"svd": 0.5, "fp16": True},
    "svd alone": {"svd": 0.5, "backward": "svd(0.5) >> int8"},
    "rank": {"rank": 8, "int8": True},
    "rank alone": {"rank": 8, "backward": None},
    "topk": {"topk": 0.25, "int4": True},
    "axes": {"codec": "axes >> coded(4)", "backward": "axes >> coded(4)"},
    "mask": {"mask": "mask", "backward": None},
    "mask and rank": {"mask": "mask", "rank": 8, "int8": True},
    "late": {"int4": True, "start_step": 2},
    "ramp": {"int4": True, "ramp": 0.5},
    "falls back": {"topk": 0.9, "int4": True},
}
"""Options of `nb.compress` by a short name."""


@dataclass
class StepResults:
    """The results of some steps: by step the loss, the codec of each direction, and the reports of links."""

    plan: nb.Plan | None = None
    losses: list[float] = field(default_factory=list)
    codecs: list[Mapping[str, str]] = field(default_factory=list)
    links: list[Mapping[str, Any]] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)


def train_with_codec(
    options: Mapping[str, Any],
    *,
    micro_batches: int = 3,
    schedule: str = "eager-1f1b",
    steps: int = 3,
    plan: bool = False,
    clusters: tuple[str, str] = ("gpu", "npu"),
) -> StepResults:
    """Train for some steps, each with its own batch."""
    keras.utils.set_random_seed(15)
    first, second = keras.layers.Dense(WIDTH, activation="tanh"), keras.layers.Dense(3)
    first.build((None, LENGTH, 12))
    second.build((None, LENGTH, WIDTH))
    variables = [*first.trainable_variables, *second.trainable_variables]

    @nb.function
    def step(x: Any, y: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batches, schedule=schedule), _compress(options):
            with nb.stage(cluster=clusters[0]):
                hidden = first(x)
            with nb.stage(cluster=clusters[1]):
                off = tf.reduce_mean(tf.square(second(hidden) - y), axis=-1)
                loss = tf.reduce_sum(off * mask) / tf.reduce_sum(mask)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    results = StepResults()
    for number in range(steps):
        results.losses.append(float(step(*draw_batch(number))))
        report = nb.last_report()
        results.codecs.append({name: each.codec for name, each in report.boundaries.items()})
        results.links.append(report.links)
    # Last, because a step that has run is not captured again.
    results.plan = nb.plan(step, *draw_batch(0)) if plan else None
    with nb.gathered():
        results.weights = [np.array(variable) for variable in variables]
    return results


def draw_batch(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets, and which positions count: about half of them."""
    generator = np.random.default_rng(number)
    mask = (generator.random((ROWS, LENGTH)) < 0.5).astype("float32")
    mask[:, 0] = 1.0
    return data(ROWS, LENGTH, 12, seed=number), data(ROWS, LENGTH, 3, seed=100 + number), mask


def _compress(options: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    return nb.compress(**options) if options else contextlib.nullcontext()
