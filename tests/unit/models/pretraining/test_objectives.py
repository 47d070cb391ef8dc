"""The losses and the learning rate, compared with NumPy implementations of the formulas."""

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.models import Bert, BertSizes
from whale_nebula.models.pretraining import (
    Discriminator,
    Objectives,
    RiseAndFall,
    correction_loss,
    detection_loss,
    guess_loss,
)

ROWS, LENGTH, VOCABULARY = 4, 6, 9
DRAW = np.random.default_rng(5)
ORIGINALS = DRAW.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
SHOWN = np.where(DRAW.random((ROWS, LENGTH)) < 0.4, (ORIGINALS + 1) % VOCABULARY, ORIGINALS).astype(np.int32)
LOGITS = DRAW.normal(0, 2, (ROWS, LENGTH)).astype(np.float32)
SCORES = DRAW.normal(0, 2, (ROWS, LENGTH, VOCABULARY)).astype(np.float32)
THERE = (np.arange(LENGTH) < DRAW.integers(2, LENGTH + 1, ROWS)[:, None]).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def probability(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The softmax at these ids."""
    every = np.exp(scores.astype(np.float64))
    return np.take_along_axis(every / every.sum(-1, keepdims=True), ids[..., None], -1)[..., 0]


def mean(each: np.ndarray) -> float:
    return float(np.mean((each * THERE).sum(1) / THERE.sum(1)))


def test_guess_loss_matches_numpy() -> None:
    assert float(guess_loss(ORIGINALS, SCORES, THERE)) == pytest.approx(
        mean(-np.log(probability(SCORES, ORIGINALS))), rel=1e-5
    )


def test_detection_loss_matches_numpy() -> None:
    replaced, probabilities = SHOWN != ORIGINALS, sigmoid(LOGITS)
    expected = mean(-np.log(np.where(replaced, probabilities, 1 - probabilities)))
    assert float(detection_loss(replaced, LOGITS, THERE)) == pytest.approx(expected, rel=1e-5)


def test_correction_loss_matches_numpy() -> None:
    copies = 1 - sigmoid(LOGITS)
    found = (SHOWN == ORIGINALS) * copies + (1 - copies) * probability(SCORES, ORIGINALS)
    assert float(correction_loss(ORIGINALS, SHOWN, LOGITS, SCORES, THERE)) == pytest.approx(
        mean(-np.log(found)), rel=1e-5
    )


def test_correction_loss_has_no_detection_gradient_and_is_finite() -> None:
    logits, scores = tf.Variable(100 * LOGITS), tf.Variable(SCORES)
    with tf.GradientTape() as tape:
        loss = correction_loss(ORIGINALS, SHOWN, logits, scores, THERE)
    of_logits, of_scores = tape.gradient(loss, [logits, scores])
    assert of_logits is None
    assert np.isfinite(float(loss)) and np.isfinite(of_scores.numpy()).all()


def test_rise_and_fall_schedule_is_piecewise_linear() -> None:
    rate, steps, warmup, peak = RiseAndFall(3e-4, steps=50, warmup=10), 50, 10, 3e-4
    for step in range(steps + 3):
        expected = peak * min((step + 1) / warmup, 1, max(0, (steps - step) / (steps - warmup)))
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert RiseAndFall(**rate.get_config())(7) == rate(7)


@pytest.mark.parametrize("options", [{"steps": 5, "warmup": 5}, {"steps": 5, "warmup": -1}])
def test_schedule_without_decay_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="invalid schedule"):
        RiseAndFall(1e-3, **options)


@pytest.mark.parametrize("options", [{"detection": 0.0}, {"correction": -1.0}])
def test_invalid_objective_weights_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Objectives(**options)


@pytest.mark.parametrize("corrects", [True, False])
def test_discriminator_outputs_match_its_bert_and_heads(corrects: bool) -> None:
    bert = Bert(BertSizes(vocabulary=VOCABULARY, length=LENGTH, width=8, heads=2, layers=1, inner=16), name="d")
    model = Discriminator(bert, corrects=corrects)
    found = model(ORIGINALS)
    hidden = bert(ORIGINALS)
    doubt = model.get_layer("d_doubt")
    assert np.allclose(found["replaced"], doubt.score(doubt.dense(hidden))[..., 0])
    assert ("tokens" in found) == corrects
    if corrects:
        made = model.get_layer("d_correct_norm")(model.get_layer("d_correct")(hidden))
        bias = model.get_layer("d_correct_bias").bias
        assert np.allclose(found["tokens"], made @ tf.transpose(bert.embedding.tokens.embeddings) + bias, atol=1e-5)
    restored = Discriminator.from_config(model.get_config())
    assert [each.path for each in restored.weights] == [each.path for each in model.weights]
