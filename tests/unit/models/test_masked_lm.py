"""BERT with its head: logits, shared table, saved and loaded."""

from pathlib import Path

import keras
import numpy as np

from whale_nebula.models.bert import Bert, BertSizes
from whale_nebula.models.masked_lm import MaskedLm, masked_lm

SIZES = BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16, spread=0.5, dropout=0.0)
INPUTS = {"tokens": np.array([[2, 5, 3, 0], [2, 7, 9, 3]], "int32"), "places": np.array([[1], [2]], "int32")}


def test_training_masked_lm_updates_its_bert() -> None:
    bert = Bert(SIZES, name="es")
    model, before = masked_lm(bert), [weight.numpy() for weight in bert.weights]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    model.train_on_batch(INPUTS, np.array([[5], [9]]))
    changed = [np.abs(weight - old).max() > 0 for weight, old in zip(bert.weights, before, strict=True)]
    # a bias that is added to all keys changes no share; of types, only the first is there
    assert sum(changed) >= len(changed) - 1


def test_loaded_masked_lm_shares_the_embedding_table(tmp_path: Path) -> None:
    model = masked_lm(Bert(SIZES, name="es"))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, MaskedLm)
    assert loaded.count_params() == model.count_params()
    assert loaded.bert.name == "es"
    np.testing.assert_array_equal(loaded(INPUTS), model(INPUTS))
