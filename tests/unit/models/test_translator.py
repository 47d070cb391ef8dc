"""The baseline transformer of ABNet: it learns to translate, and its two stages are one model."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.models.small_translators import END, MASK, PAD, SOURCE, START, TARGET, pairs, translator
from whale_nebula.models.decoding import Beam
from whale_nebula.models.smoothing import SmoothedCrossentropy
from whale_nebula.models.translator import Translator


def test_all_translator_weights_are_trainable() -> None:
    model = translator()
    assert len(model.trainable_variables) == len(model.weights) > 50


@pytest.mark.grid
def test_translator_learns_and_beam_search_translates() -> None:
    sizes = [replace(each, norm="pre", width=24, heads=2, inner=48) for each in (SOURCE, TARGET)]
    model, (x, y) = Translator(*sizes), pairs(64)
    optimizer, loss_of = keras.optimizers.Adam(1e-2), SmoothedCrossentropy()
    x, y = {side: tf.constant(ids) for side, ids in x.items()}, tf.constant(y)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for _ in range(150):
        step()
    found = tf.function(lambda ids: model(ids, search=Beam(START, END, 7, never=(PAD, START, MASK))).best)(x["source"])
    assert np.mean(np.all(found == y, axis=1)) > 0.9
