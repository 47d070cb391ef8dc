"""ABNet, filled in: all words at once, from those that are shown (a conditional masked language model).

The same two frozen BERTs and the same adapters as where it is written from left to right, with two differences. The
target's BERT looks both ways, as it was pretrained, at words some of which are hidden (`hiding`), and is asked for
those. And as nothing says where a sentence ends, its number of words is predicted from the source's hidden states.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from .abnet import Adapters, bert_of, loaded, saved, source_side, target_side
from .bert import Bert
from .decoding import Found, MaskPredict
from .decoding.stepwise import mask_predicted
from .encoder import Source
from .masked_lm import MaskedLm
from .sides import Around, Sides, Translating, check_names, nowhere, pair_inputs


@keras.saving.register_keras_serializable("whale_nebula")
class LengthScores(keras.layers.Layer):
    """How many words a translation will have: a score for each number up to `longest`, from the mean of the source.

    >>> import numpy as np
    >>> LengthScores(longest=6)(np.zeros((2, 5, 8)), np.ones((2, 5), bool)).shape
    TensorShape([2, 7])
    """

    def __init__(self, longest: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.longest = longest
        self.dense = keras.layers.Dense(longest + 1, dtype=self.dtype_policy, name="dense")
        self.supports_masking = True

    def build(self, hidden_shape: Any, visible_shape: Any) -> None:
        """Make the weights."""
        self.dense.build((hidden_shape[0], hidden_shape[2]))

    def call(self, hidden: Any, visible: Any) -> Any:
        """The scores of a batch of sources."""
        counted = ops.cast(visible, hidden.dtype)[:, :, None]
        words = ops.maximum(ops.sum(counted, axis=1), 1)
        return self.dense(ops.sum(hidden * counted, axis=1) / words)

    def compute_mask(self, hidden: Any, previous_mask: Any = None) -> None:
        """A row has one length: no places are left to be marked."""

    def get_config(self) -> dict[str, Any]:
        """What it takes to make another one."""
        return {**super().get_config(), "longest": self.longest}


@keras.saving.register_keras_serializable("whale_nebula")
class MaskedABNet(Translating):
    """{"source": ids, "target": ids, some of them hidden} in; {"words": logits of all places, "length": scores} out.

    All else as in `CausalABNet`. A head of the target's BERT (`masked_lm`) is at home here: it guesses hidden words.
    `longest` is how many words a translation may have: as many as the target's BERT has positions for, if None.

    >>> from whale_nebula.models.bert import BertSizes
    >>> sizes = BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16)
    >>> model = MaskedABNet(Bert(sizes, name="es"), Bert(sizes, name="en"), inner=4)
    >>> {name: output.shape for name, output in model.output.items()}
    {'words': (None, None, 11), 'length': (None, 5)}
    """

    searched_by = MaskPredict

    def __init__(
        self,
        source: Bert,
        target: Bert | MaskedLm,
        *,
        inner: int = 512,
        dropout: float = 0.0,
        tied: bool = True,
        longest: int | None = None,
        around: Around = nowhere,
        name: str = "abnet",
    ) -> None:
        bert = bert_of(target)
        check_names(source, bert)
        adapters = Adapters(inner, dropout)
        encoder, decoder = source_side(source, adapters), target_side(target, adapters, tied=tied, causal=False)
        lengths = LengthScores(longest or bert.sizes.length - 2, name=f"{bert.name}_length")
        inputs = pair_inputs()
        with around("source"):
            hidden = encoder(inputs["source"])
        with around("target"):
            outputs = {"words": decoder(inputs["target"], hidden), "length": lengths(*hidden)}
        config = {**saved(source, target), **adapters._asdict(), "tied": tied, "longest": longest, "name": name}
        super().__init__(inputs, outputs, Sides(encoder, decoder, around), config)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MaskedABNet:
        """Another one like it, without scopes."""
        return cls(**loaded(config))

    @property
    def lengths(self) -> LengthScores:
        """The layer that predicts how many words a translation has."""
        return next(layer for layer in self.layers if isinstance(layer, LengthScores))

    def find(self, source: Source, search: MaskPredict) -> Found:
        """Mask-predict, for several lengths at once."""
        return mask_predicted(self.sides.decoder, source, self.lengths(*source), search)
