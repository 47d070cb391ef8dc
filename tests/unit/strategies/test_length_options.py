"""Numbers of micro-batches and codecs that a curriculum gives by length, in `fit` and in loops."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NebulaError, OptionError
from whale_nebula.strategies import Curriculum

LENGTH = 32


def data_of(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(0).normal(size=(2, rows, LENGTH)).astype("float32")
    return x, y


def model_of(cut: bool, micro_batch: int | None = None, codec: Any = None) -> keras.Model:
    """Two layers for sequences of any length, in two stages if `cut`."""
    gpu, npu = (nb.stage(cluster=name) if cut else nullcontext() for name in ("gpu", "npu"))
    with nb.cluster() if cut else nullcontext(), nb.pipeline(micro_batch) if micro_batch else nullcontext():
        inputs = keras.Input((None,))
        with gpu, nb.compress(codec) if codec else nullcontext():
            hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Reshape((-1, 1))(inputs))
        with npu:
            outputs = keras.layers.Reshape((-1,))(keras.layers.Dense(1)(hidden))
    return keras.Model(inputs, outputs, name="of_any_length")


class Looks(keras.callbacks.Callback):
    """Keeps loss and report of each step, and counts traces."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, float, int]] = []
        self.notes: list[str] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        report = nb.last_report()
        link = report.links["gpu->npu"]
        self.steps.append((report.micro_batches, round(link.raw_bytes / link.payload_bytes, 1), link.raw_bytes))
        self.notes += report.notes


def train(curriculum: Curriculum, cut: bool, **model: Any) -> tuple[Any, Looks, list[Any]]:
    keras.utils.set_random_seed(1)
    traced: list[Any] = []

    def loss(y: Any, found: Any) -> Any:
        traced.append(tuple(y.shape))
        return tf.reduce_mean((y - found) ** 2, axis=-1)

    trained, looks = model_of(cut, **model), Looks()
    trained.compile(keras.optimizers.SGD(0.1), loss)
    data = tf.data.Dataset.from_tensor_slices(data_of(16)).batch(4)
    callbacks = [curriculum, looks] if cut else [curriculum]
    history = trained.fit(data, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    return (history, trained.get_weights()), looks, traced


def test_in_fit_micro_batches_and_codec_follow_the_length() -> None:
    """The numbers are those of plain Keras with the same batches, and lengths with equal options share a trace."""
    lengths = {"start": 8, "end": LENGTH, "steps": 6, "step": 8}
    tables = {"micro_batch": {8: 1, 16: 4}, "compress": {16: "none", 24: nb.compress(fp16=True, backward="fp16")}}
    found, looks, traced = train(Curriculum(**lengths, **tables), cut=True, micro_batch=2, codec="bf16")
    expected, _, _ = train(Curriculum(**lengths), cut=False)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-3)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
    plan = Curriculum(**lengths)
    shares = {8: (1, 2.0), 16: (4, 1.0), 24: (4, 2.0), 32: (4, 2.0)}
    assert [step[:2] for step in looks.steps] == [shares[plan.length(step)] for step in range(8)]
    assert len(traced) <= 4
    assert any("gives sequences of 24, 32 4 micro-batches and codec fp16" in note for note in looks.notes)
