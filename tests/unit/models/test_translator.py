"""The transformer that ABNet is compared with: it learns to translate, and its two stages are one model."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.models.small import END, MASK, PAD, SOURCE, START, TARGET, far_from_zero, in_two, pairs, translator
from whale_nebula.models.decoding import Beam
from whale_nebula.models.smoothing import SmoothedCrossentropy
from whale_nebula.models.translator import Translator


def test_everything_is_trained() -> None:
    model = translator()
    assert len(model.trainable_variables) == len(model.weights) > 50


def test_a_word_changes_nothing_before_it_and_padding_of_the_source_nothing_at_all() -> None:
    model, (x, _) = translator(), pairs()
    far_from_zero(model)
    expected = model(x).numpy()
    other = model({**x, "target": np.where(np.arange(7) == 4, 11, x["target"])}).numpy()
    np.testing.assert_allclose(other[:, :4], expected[:, :4], rtol=1e-5, atol=1e-5)
    shorter = model({"source": x["source"][:1, : int((x["source"][0] > 0).sum())], "target": x["target"][:1]})
    np.testing.assert_allclose(shorter, expected[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"tied": True}, {"tied": False}])
def test_it_can_be_saved_and_loaded(tmp_path, options: dict) -> None:
    model, (x, _) = translator(**options), pairs()
    far_from_zero(model)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.grid
def test_it_learns_to_translate_word_by_word_and_the_search_writes_it() -> None:
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


@pytest.mark.grid
def test_in_two_stages_and_three_micro_batches_it_is_the_same_model() -> None:
    with nb.cluster(), nb.pipeline(micro_batch=3):
        model = translator(in_two)
    model.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy())
    verification = nb.verify(model, *pairs())
    assert verification.ok, verification
    assert verification.stages == ("source", "target")
