"""The model of the benchmark, and a contender's side of it: steps on request, their seconds, and peak memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.replica import step_server

ROWS, INPUTS, FEATURES, RATE = 32, 1024, 512, 1e-3
HIDDEN = (2048, 1536, FEATURES)
"""The body has 6 million weights in residual dense layers; a head of 100,000 classes has 51 million."""


def make_body() -> list[keras.layers.Layer]:
    """The layers before the classifier."""
    return [keras.layers.Dense(width, activation="relu", name=f"body{n}") for n, width in enumerate(HIDDEN)]


def make_batch(classes: int, rows: int = ROWS, seed: int = 0) -> tuple[Any, Any]:
    """Rows with their classes."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, INPUTS)).astype("float32")
    return tf.constant(x), tf.constant(draw.integers(0, classes, rows))


def compute_loss(logits: Any, y: Any) -> Any:
    """The mean loss over the rows."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def measure_peak_mib() -> float:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(door: str, name: str, step: Callable[[], object], before: float) -> None:
    """Run every requested block; `before` is the peak of memory before the model was created."""
    step_server.serve(
        door, name, step, lambda seconds: {"seconds": seconds, "peak": measure_peak_mib(), "before": before}
    )
