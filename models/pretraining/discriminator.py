"""The discriminator, the model that is kept: a BERT that predicts for each token whether it was replaced, and its
original.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from ..attention import Configured, near_zero
from ..bert import Bert
from ..layers import find_activation
from ..masked_lm import Bias


@keras.saving.register_keras_serializable("whale_nebula")
class Doubt(Configured):
    """The head for detection: a dense layer, and a logit of being replaced."""

    def __init__(self, width: int, activation: str, spread: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = {"width": width, "activation": activation, "spread": spread}
        options = {"kernel_initializer": near_zero(spread), "dtype": self.dtype_policy}
        self.dense = keras.layers.Dense(width, find_activation(activation), name="dense", **options)
        self.score = keras.layers.Dense(1, name="score", **options)

    def build(self, shape: Any) -> None:
        """Create the weights of both."""
        self.dense.build(shape)
        self.score.build(shape)

    def call(self, hidden: Any) -> Any:
        """A logit for each token: (rows, length)."""
        return ops.squeeze(self.score(self.dense(hidden)), axis=-1)

    def compute_output_spec(self, hidden: Any) -> Any:
        """The output's shape and type, without tracing the layer."""
        return keras.KerasTensor(hidden.shape[:-1], self.compute_dtype)


@keras.saving.register_keras_serializable("whale_nebula")
class Discriminator(keras.Model):
    """A BERT with its heads: tokens in, `{"replaced": logits}` out, and with `corrects` also `{"tokens": scores}`.

    The BERT is trained in place and is the model to fine-tune; the heads are discarded.

    Args:
        bert: the BERT.
        corrects: whether it has a head that predicts the original tokens.

    >>> from whale_nebula.models.bert import BertSizes
    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16), name="d")
    >>> {name: each.shape for name, each in Discriminator(bert).output.items()}
    {'replaced': (None, None), 'tokens': (None, None, 11)}
    """

    def __init__(self, bert: Bert, *, corrects: bool = True, **kwargs: Any) -> None:
        sizes, name = bert.sizes, bert.name
        hidden = bert.output
        found = {"replaced": Doubt(sizes.width, sizes.activation, sizes.spread, name=f"{name}_doubt")(hidden)}
        if corrects:
            dense = keras.layers.Dense(
                sizes.width,
                find_activation(sizes.activation),
                kernel_initializer=near_zero(sizes.spread),
                name=f"{name}_correct",
            )
            norm = keras.layers.LayerNormalization(epsilon=sizes.epsilon, name=f"{name}_correct_norm")
            scores = bert.embedding(norm(dense(hidden)), reverse=True)
            found["tokens"] = Bias(name=f"{name}_correct_bias")(scores)
        kwargs.setdefault("name", f"{name}_discriminator")
        super().__init__(bert.input, found, **kwargs)
        self.bert, self.corrects = bert, corrects

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {"bert": self.bert.get_config(), "corrects": self.corrects, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Discriminator:
        """Create an equal one, with a new BERT."""
        return cls(Bert.from_config(config["bert"]), corrects=config["corrects"], name=config["name"])
