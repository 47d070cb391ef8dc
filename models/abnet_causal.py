"""ABNet, written from left to right.

Two BERTs that were pretrained apart, the source's in one place and the target's in another, learn to translate. Both
stay frozen; what is trained stands between their sub-layers:

    source ids ─ embedding ─[ attention ─ adapter ─ feed-forward ─ adapter ]× ─ hidden states
                                                                                     │  the slow line
    shown ids ── embedding ─[ attention ─ adapter ─ feed-forward ─ adapter ]× ─ scores of the next word

An adapter of the source's side is a norm and two dense layers. One of the target's side first looks at the source's
hidden states. The target's BERT, which had looked both ways, looks from left to right.
"""

from __future__ import annotations

from typing import Any

import keras

from .abnet import Adapters, bert_of, loaded, saved, source_side, target_side
from .bert import Bert
from .decoding import Beam, Found
from .decoding.stepwise import beamed
from .encoder import Source
from .masked_lm import MaskedLm
from .sides import Around, Sides, Translating, check_names, nowhere, pair_inputs


@keras.saving.register_keras_serializable("whale_nebula")
class CausalABNet(Translating):
    """{"source": ids, "target": ids from the start on} in, logits of the word after each shown one out.

    `around(side)` gives the scope around each side. `target` may be a BERT with its head (`masked_lm`): then this head,
    frozen too, scores the words; otherwise a new norm and, if `tied`, the BERT's own table do. Both BERTs are frozen.

    >>> import whale_nebula as nb
    >>> from whale_nebula.models.bert import BertSizes
    >>> sizes = BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16)
    >>> with nb.cluster():
    ...     model = CausalABNet(
    ...         Bert(sizes, name="es"), Bert(sizes, name="en"), inner=4, around=lambda side: nb.stage(cluster=side)
    ...     )
    >>> model.output.shape, sorted({weight.path.split("/")[0] for weight in model.trainable_variables})
    ((None, None, 11), ['en_attention0_adapter', 'en_inner0_adapter', 'en_output_bias', 'en_output_norm',
    'es_attention0_adapter', 'es_inner0_adapter'])
    """

    searched_by = Beam

    def __init__(
        self,
        source: Bert,
        target: Bert | MaskedLm,
        *,
        inner: int = 512,
        dropout: float = 0.0,
        tied: bool = True,
        around: Around = nowhere,
        name: str = "abnet",
    ) -> None:
        check_names(source, bert_of(target))
        adapters = Adapters(inner, dropout)
        encoder, decoder = source_side(source, adapters), target_side(target, adapters, tied=tied, causal=True)
        inputs = pair_inputs()
        with around("source"):
            hidden = encoder(inputs["source"])
        with around("target"):
            logits = decoder(inputs["target"], hidden)
        config = {**saved(source, target), **adapters._asdict(), "tied": tied, "name": name}
        super().__init__(inputs, logits, Sides(encoder, decoder, around), config)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> CausalABNet:
        """Another one like it, without scopes."""
        return cls(**loaded(config))

    def find(self, source: Source, search: Beam) -> Found:
        """Beam search, with what is known of each beginning kept."""
        return beamed(self.sides.decoder, source, search)
