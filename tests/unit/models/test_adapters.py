"""Adapters and cross-attention: near zero at first, trainable, and masked."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.models.small_translators import randomize_weights
from whale_nebula.models.adapters import DecoderAdapter, EncoderAdapter
from whale_nebula.models.attention import expand_mask
from whale_nebula.models.layers import CrossAttention

RANDOM = np.random.default_rng(0)
HIDDEN = tf.constant(RANDOM.normal(size=(2, 3, 8)), tf.float32)
SOURCE = RANDOM.normal(size=(2, 5, 12)).astype("float32")
VISIBLE = np.array([[True, True, True, False, False], [True] * 5])


def layers() -> dict[str, keras.layers.Layer]:
    return {
        "encoder": EncoderAdapter(8, inner=4),
        "decoder": DecoderAdapter(8, heads=2, inner=4),
        "post": CrossAttention(8, heads=2),
        "pre": CrossAttention(8, heads=2, norm="pre"),
    }


def call_layer(layer: keras.layers.Layer, source: np.ndarray = SOURCE) -> tf.Tensor:
    return layer(HIDDEN, source, VISIBLE) if isinstance(layer, CrossAttention) else layer(HIDDEN)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_new_adapter_is_close_to_identity(name: str) -> None:
    assert float(tf.reduce_max(abs(call_layer(layers()[name]) - HIDDEN))) < 0.05


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_new_adapter_has_gradients_for_all_weights(name: str) -> None:
    layer = layers()[name]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(call_layer(layer) ** 3)
    for weight, gradient in zip(layer.trainable_weights, tape.gradient(loss, layer.trainable_variables), strict=True):
        if not weight.path.endswith("key/bias"):  # softmax does not see what all keys have in common
            assert float(tf.reduce_max(abs(gradient))) > 0, weight.path


@pytest.mark.parametrize("name", ["decoder", "post", "pre"])
def test_invisible_source_does_not_affect_the_output(name: str) -> None:
    layer = layers()[name]
    call_layer(layer)
    randomize_weights(layer)
    unseen = np.where(VISIBLE[..., None], SOURCE, 7.0).astype("float32")
    seen = np.where(VISIBLE[..., None], 7.0, SOURCE).astype("float32")
    np.testing.assert_allclose(call_layer(layer, unseen), call_layer(layer), rtol=1e-5, atol=1e-6)
    assert np.abs(call_layer(layer, seen) - call_layer(layer)).max() > 1e-2


@pytest.mark.parametrize("name", ["decoder", "post", "pre"])
def test_remembered_source_gives_the_same_output(name: str) -> None:
    layer = layers()[name]
    expected = call_layer(layer)
    restored = layer.attend_cache(HIDDEN, layer.make_cache(SOURCE), expand_mask(tf.constant(VISIBLE)))
    np.testing.assert_allclose(restored, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(layers()))
def test_adapter_is_restored_from_its_config(name: str) -> None:
    layer = layers()[name]
    before = call_layer(layer)
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    call_layer(restored)
    restored.set_weights(layer.get_weights())
    np.testing.assert_allclose(call_layer(restored), before, rtol=1e-6)
    assert restored.get_config() == layer.get_config()
