"""The smoothed loss: its formula, padding, and saving."""

import keras
import numpy as np
import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.smoothing import SmoothedCrossentropy

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(3, 4, 6)).astype("float32")
LABELS = np.array([[1, 2, 3, 4], [5, 1, 0, 0], [2, 0, 0, 0]])


def smoothed_losses(smoothing: float) -> np.ndarray:
    """The loss of each word against a label that is spread out."""
    likely = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    labels = (1 - smoothing) * np.eye(6)[LABELS] + smoothing / 6
    return -(labels * likely).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_loss_matches_its_formula(smoothing: float) -> None:
    expected = smoothed_losses(smoothing)[LABELS > 0].mean()
    assert float(SmoothedCrossentropy(smoothing)(LABELS, LOGITS)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_sample_weights_apply_to_rows_or_words(shape: tuple[int, ...]) -> None:
    weights = RANDOM.uniform(0.5, 2.0, shape)
    each = np.broadcast_to(weights[:, None] if len(shape) == 1 else weights, LABELS.shape) * (LABELS > 0)
    expected = (smoothed_losses(0.1) * each).sum() / each.sum()
    assert float(SmoothedCrossentropy(0.1)(LABELS, LOGITS, weights)) == pytest.approx(expected, rel=1e-5)


def test_padding_id_is_configurable() -> None:
    shifted, logits = np.where(LABELS == 0, 5, LABELS - 1), np.roll(LOGITS, -1, axis=2)
    loss = SmoothedCrossentropy(padding=5)(shifted, logits)
    assert float(loss) == pytest.approx(float(SmoothedCrossentropy()(LABELS, LOGITS)), rel=1e-6)


def test_loss_of_padding_only_is_zero() -> None:
    assert float(SmoothedCrossentropy()(np.zeros_like(LABELS), LOGITS)) == 0.0


def test_smoothed_loss_is_restored_from_config() -> None:
    loss = SmoothedCrossentropy(0.2, padding=3)
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert isinstance(restored, SmoothedCrossentropy) and restored.get_config() == loss.get_config()


@pytest.mark.parametrize("wrong", [-0.1, 1.0])
def test_invalid_smoothing_is_refused_with_a_fix(wrong: float) -> None:
    with pytest.raises(OptionError) as caught:
        SmoothedCrossentropy(wrong)
    assert caught.value.mend
