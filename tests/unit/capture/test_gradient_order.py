"""A tensor that several ops read: a cut step adds its gradients in the order of the uncut tape."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb

layers = keras.layers

PARTS: dict[str, Callable[[Any], Any]] = {
    "batch normalization": lambda hidden: layers.BatchNormalization()(hidden),
    "layer normalization": lambda hidden: layers.LayerNormalization()(hidden),
    "group normalization": lambda hidden: layers.GroupNormalization(2)(hidden),
    "additive attention": lambda hidden: layers.AdditiveAttention()([hidden, hidden]),
    "functions": lambda hidden: keras.ops.sin(hidden) * keras.ops.exp(hidden) + keras.ops.square(hidden),
}


@pytest.fixture(params=[False, True], ids=["plain", "optimizer"])
def graph_optimizer(request: pytest.FixtureRequest) -> Iterator[None]:
    """With TensorFlow's graph optimizer, sums are sorted by the names of their terms; without it, they stay as made."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not request.param})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.mark.usefixtures("graph_optimizer")
@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_a_tensor_with_several_readers_are_bit_identical(name: str) -> None:
    inputs = keras.Input((3, 4))
    with nb.stage(cluster="a"):
        hidden = layers.Dense(4, use_bias=False)(inputs)
    with nb.stage(cluster="b"):
        hidden = PARTS[name](hidden)
    with nb.stage(cluster="c"):
        outputs = layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)

    def compute_gradients(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        return tape.gradient(loss, model.trainable_variables)

    x = np.random.default_rng(1).standard_normal((32, 3, 4)).astype(np.float32)
    with pytest.warns(nb.errors.NebulaWarning, match="runs uncut"):
        uncut = tf.function(compute_gradients, input_signature=[tf.TensorSpec([None, 3, 4])])(tf.constant(x))
    cut = nb.function(compute_gradients)(x)
    assert list(nb.last_report().stages) == ["a", "b", "c"]
    for one, other in zip(uncut, cut, strict=True):
        np.testing.assert_array_equal(np.array(other), np.array(one))
