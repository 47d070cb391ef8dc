"""Masked language modelling: BERT with a head that predicts the tokens at hidden places."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from .attention import Configured, near_zero
from .bert import Bert
from .layers import find_activation


@keras.saving.register_keras_serializable("whale_nebula")
class Guess(Configured):
    """The head's transformation: gather hidden states at the places to predict, then a dense layer and a norm."""

    def __init__(self, width: int, activation: str, epsilon: float, spread: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = {"width": width, "activation": activation, "epsilon": epsilon, "spread": spread}
        self.dense = keras.layers.Dense(
            width,
            activation=find_activation(activation),
            kernel_initializer=near_zero(spread),
            dtype=self.dtype_policy,
            name="dense",
        )
        self.norm = keras.layers.LayerNormalization(epsilon=epsilon, dtype=self.dtype_policy, name="norm")

    def build(self, hidden_shape: Any, places_shape: Any) -> None:
        """Create the weights of both parts."""
        self.dense.build(hidden_shape)
        self.norm.build(hidden_shape)

    def call(self, hidden: Any, places: Any) -> Any:
        """The vectors of the places: (rows, places, width)."""
        return self.norm(self.dense(ops.take_along_axis(hidden, places[:, :, None], axis=1)))

    def compute_output_spec(self, hidden: Any, places: Any) -> Any:
        """The output's shape and type, without tracing the layer."""
        return keras.KerasTensor((*places.shape, hidden.shape[-1]), self.compute_dtype)


@keras.saving.register_keras_serializable("whale_nebula")
class Bias(keras.layers.Layer):
    """A bias for each token, added to its logit."""

    def build(self, shape: Any) -> None:
        """Create the biases as zeros."""
        self.bias = self.add_weight((shape[-1],), initializer="zeros", name="bias")

    def call(self, scores: Any) -> Any:
        """The logits plus biases."""
        return scores + self.bias


@keras.saving.register_keras_serializable("whale_nebula")
class MaskedLm(keras.Model):
    """A BERT and its masked-language-modelling head, which shares the BERT's token table. The BERT is trained in place.

    Inputs are rows of `tokens` and the `places` to predict. Logits are computed at these places only, because most
    tokens of a row are not hidden.
    """

    def __init__(self, bert: Bert, **kwargs: Any) -> None:
        sizes, name = bert.sizes, bert.name
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        places = keras.Input((None,), dtype="int32", name="places")
        guess = Guess(sizes.width, sizes.activation, sizes.epsilon, sizes.spread, name=f"{name}_guess")
        scores = bert.embedding(guess(bert(tokens), places), reverse=True)
        logits = Bias(name=f"{name}_bias")(scores)
        kwargs.setdefault("name", f"{name}_masked_lm")
        super().__init__({"tokens": tokens, "places": places}, logits, **kwargs)
        self.bert = bert

    @property
    def guess(self) -> Guess:
        """The head's dense layer and norm."""
        return self.get_layer(f"{self.bert.name}_guess")

    @property
    def bias(self) -> Bias:
        """The head's last layer."""
        return self.get_layer(f"{self.bert.name}_bias")

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {"bert": self.bert.get_config(), "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MaskedLm:
        """Create an equal one, with a new BERT."""
        return cls(Bert.from_config(config["bert"]), name=config["name"], trainable=config["trainable"])


def masked_lm(bert: Bert) -> MaskedLm:
    """Add a masked-language-modelling head to a BERT, which is trained in place.

    The model takes `{"tokens", "places"}` and returns logits (rows, places, vocabulary).

    >>> from whale_nebula.models.bert import BertSizes
    >>> model = masked_lm(Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16)))
    >>> model.output.shape
    (None, None, 11)
    """
    return MaskedLm(bert)
