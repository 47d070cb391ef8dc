"""ABNet that fills in: bidirectional attention, lengths, and training in two stages."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.models.small_translators import END, MASK, PAD, START, VOCABULARY, cmlm, pairs, randomize_weights
from whale_nebula.models.abnet import LengthScores
from whale_nebula.models.masking import Hiding
from whale_nebula.models.smoothing import SmoothedCrossentropy

HIDING = Hiding(MASK, (PAD, START, END))


def batch(rows: int = 6) -> tuple[dict, dict]:
    data = tf.data.Dataset.from_tensor_slices(pairs(rows)).batch(rows)
    ((x, y),) = HIDING.of_batches(data).as_numpy_iterator()
    return x, y


def compile_model(model: keras.Model) -> keras.Model:
    lengths = keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="lengths")
    losses = {"words": SmoothedCrossentropy(), "length": lengths}
    model.compile(keras.optimizers.SGD(0.3), losses, loss_weights={"words": 1.0, "length": 0.1})
    return model


def test_only_adapters_and_length_head_are_trainable() -> None:
    trained = {weight.path.split("/")[0] for weight in cmlm().trainable_variables}
    adapters = {f"{side}_{part}0_adapter" for side in ("es", "en") for part in ("attention", "inner")}
    assert trained == adapters | {"en_length"}


def test_masked_abnet_attends_in_both_directions() -> None:
    model, (x, _) = cmlm(), batch()
    randomize_weights(model)
    whole = {**x, "target": np.where(x["target"] == PAD, 5, x["target"])}
    before = model(whole)["words"].numpy()
    for place, seen_from in ((7, 0), (0, 7)):
        other = {**whole, "target": np.where(np.arange(8) == place, 9, whole["target"])}
        assert np.abs(model(other)["words"].numpy() - before)[:, seen_from].max() > 1e-4


def test_masked_abnet_ignores_padding() -> None:
    model, (x, _) = cmlm(), batch()
    randomize_weights(model)
    all_outputs = model(x)
    for row in range(6):
        ids, shown = (x[side][row][x[side][row] != PAD] for side in ("source", "target"))
        alone = model({"source": ids[None], "target": shown[None]})
        np.testing.assert_allclose(alone["words"][0], all_outputs["words"][row, : len(shown)], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(alone["length"][0], all_outputs["length"][row], rtol=1e-3, atol=1e-3)


def test_length_head_reads_the_mean_of_visible_states() -> None:
    layer, hidden = LengthScores(4), np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
    scores = layer(hidden, np.array([[True, True, False]]))
    expected = hidden[:, :2].mean(axis=1) @ layer.dense.kernel.numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(layer(hidden, np.zeros((1, 3), bool))).all()


def test_longest_limits_the_length_logits() -> None:
    x, _ = batch()
    found = cmlm()(x)
    assert found["length"].shape == (6, 7) and cmlm(longest=3)(x)["length"].shape == (6, 4)
    assert found["words"].shape == (6, 8, VOCABULARY)


@pytest.mark.grid
def test_masked_abnet_learns_words_and_length() -> None:
    model, (x, y) = cmlm(tied=False), batch()  # random heads, frozen, can say next to nothing
    optimizer = keras.optimizers.Adam(0.03)
    lengths = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            losses = SmoothedCrossentropy()(y["words"], outputs["words"]), lengths(y["length"], outputs["length"])
            loss = sum(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return losses

    first, *_, last = (step() for _ in range(40))
    assert all(float(late) < 0.7 * float(early) for early, late in zip(first, last, strict=True))
