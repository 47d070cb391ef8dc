"""Inputs that are reshaped by way of a model's output count their own rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb

WEIGHT = np.linspace(-1.0, 1.0, 20, dtype="float32").reshape(4, 5)


@pytest.fixture(autouse=True)
def closed():
    nb.shutdown()
    yield
    nb.shutdown()


def _step(micro_batch: int, shaped: Callable[[Any, Any], Any]) -> list[Any]:
    """Loss and gradient of a masked mean; `shaped` reshapes the mask; without micro-batches there are no scopes."""
    weight = tf.Variable(WEIGHT)

    @contextlib.contextmanager
    def scopes() -> Iterator[None]:
        with nb.cluster(), nb.pipeline(micro_batch), nb.stage(cluster="a"):
            yield

    def step(x: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape:
            with scopes() if micro_batch else contextlib.nullcontext():
                hidden = tf.tanh(x @ weight)
            kept = shaped(mask, hidden)
            loss = tf.reduce_sum(hidden * kept) / tf.reduce_sum(kept)
        return loss, tape.gradient(loss, weight)

    random = np.random.default_rng(0)
    x = random.standard_normal((7, 4)).astype("float32")
    mask = (random.random((7, 1, 5)) > 0.5).astype("float32")
    return [np.array(t) for t in (nb.function if micro_batch else tf.function)(step)(x, mask)]


def _by_the_output(mask: Any, hidden: Any) -> Any:
    return tf.reshape(mask, tf.shape(hidden))


def _by_its_rows(mask: Any, hidden: Any) -> Any:
    return tf.reshape(mask, [tf.shape(hidden)[0], 5])


def _by_a_piece(mask: Any, hidden: Any) -> Any:
    return tf.reshape(mask, tf.concat([tf.shape(hidden)[:1], [5]], 0))


@pytest.mark.parametrize("shaped", [_by_the_output, _by_its_rows, _by_a_piece])
def test_what_a_mean_is_divided_by_may_be_shaped_as_the_models_output(shaped: Callable[[Any, Any], Any]) -> None:
    for expected, found in zip(_step(0, shaped), _step(3, shaped), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert nb.last_report().micro_batches == 3
