"""The baseline of ABNet: a transformer whose encoder and decoder are trained from scratch on sentence pairs.

It has the layers of a BERT, none of them frozen or pretrained, and cross-attention between self-attention and
feed-forward part of the decoder's layers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import keras

from .bert import Bert, BertSizes
from .decoder import Decoder, Scores
from .encoder import Encoder
from .layers import CrossAttention
from .masked_lm import Bias
from .sides import Around, Sides, Translating, nowhere


@keras.saving.register_keras_serializable("whale_nebula")
class Translator(Translating):
    """A transformer for translation that is trained from scratch.

    Inputs are `{"source": ids, "target": ids with the start token}`; the output is the logits of the next word at each
    position.

    Args:
        source: sizes of the encoder.
        target: sizes of the decoder.
        tied: whether logits are computed with the decoder's token table.
        around: called with "source" and "target"; returns the scope to build that side in, such as `nb.stage`.
        name: name of the model.

    >>> sizes = BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16)
    >>> Translator(sizes, sizes).output.shape
    (None, None, 11)
    """

    def __init__(
        self,
        source: BertSizes,
        target: BertSizes,
        *,
        tied: bool = True,
        around: Around = nowhere,
        name: str = "translator",
    ) -> None:
        encoder, decoder = _build_source_side(source), _build_target_side(target, tied=tied)
        config = {"source": asdict(source), "target": asdict(target), "tied": tied, "name": name}
        super().__init__(Sides(encoder, decoder, around), config)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Translator:
        """Create an equal model, without scopes."""
        sizes = {side: BertSizes(**config[side]) for side in ("source", "target")}
        return cls(**{**config, **sizes})


def _build_source_side(sizes: BertSizes) -> Encoder:
    bert = Bert(sizes, name="source")
    layers = tuple(layer for both in bert.sub_layers for layer in both)
    return Encoder(bert.visible, bert.embedding, layers, bert.ending)


def _build_target_side(sizes: BertSizes, *, tied: bool) -> Decoder:
    bert = Bert(sizes, name="target")
    layers: list[keras.layers.Layer] = []
    for number, (attention, inner) in enumerate(bert.sub_layers):
        layers += [attention, _build_cross_attention(sizes, f"target_source_attention{number}"), inner]
    layers += [] if bert.ending is None else [bert.ending]
    return Decoder(bert.embedding, tuple(layers), _build_scores(bert, tied=tied))


def _build_cross_attention(sizes: BertSizes, name: str) -> CrossAttention:
    dropout = sizes.dropout if sizes.attention_dropout is None else sizes.attention_dropout
    return CrossAttention(
        sizes.width, sizes.heads, norm=sizes.norm, attention_dropout=dropout, **sizes.common, name=name
    )


def _build_scores(bert: Bert, *, tied: bool) -> Scores:
    if tied:
        return Scores((), bert.embedding, Bias(name="target_output_bias"))
    return Scores((keras.layers.Dense(bert.sizes.vocabulary, name="target_output"),))
