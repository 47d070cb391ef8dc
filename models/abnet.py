"""What both ABNets are made of: two frozen BERTs, with an adapter after each of their sub-layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from .adapters import DecoderAdapter, EncoderAdapter
from .bert import Bert
from .decoder import Decoder
from .encoder import Encoder
from .masked_lm import Bias, MaskedLm
from .scores import Scores


class Adapters(NamedTuple):
    """How large adapters are: `inner` between their two dense layers; how much they drop while they are trained."""

    inner: int = 512
    dropout: float = 0.0


def source_side(bert: Bert, adapters: Adapters) -> Encoder:
    """The source's BERT, frozen, with an `EncoderAdapter` after each sub-layer."""
    freeze(bert)
    layers: list[keras.layers.Layer] = []
    for layer in (layer for both in bert.sub_layers for layer in both):
        layers += [layer, EncoderAdapter(bert.sizes.width, **adapters._asdict(), name=f"{layer.name}_adapter")]
    return Encoder(bert.visible, bert.embedding, tuple(layers), bert.ending)


def target_side(target: Bert | MaskedLm, adapters: Adapters, *, tied: bool, causal: bool) -> Decoder:
    """The target's BERT, frozen, with a `DecoderAdapter` after each sub-layer, and scores of its vocabulary."""
    freeze(target)
    bert, layers = bert_of(target), list[keras.layers.Layer]()
    for layer in (layer for both in bert.sub_layers for layer in both):
        name = f"{layer.name}_adapter"
        layers += [layer, DecoderAdapter(bert.sizes.width, bert.sizes.heads, **adapters._asdict(), name=name)]
    layers += [] if bert.ending is None else [bert.ending]
    return Decoder(bert.embedding, tuple(layers), _scores(target, tied=tied), visible=None if causal else bert.visible)


def saved(source: Bert, target: Bert | MaskedLm) -> dict[str, Any]:
    """What a config says of the two BERTs."""
    serialized = keras.saving.serialize_keras_object
    return {"source": serialized(source), "target": serialized(target)}


def loaded(config: dict[str, Any]) -> dict[str, Any]:
    """A config with BERTs again."""
    both = {side: keras.saving.deserialize_keras_object(config[side]) for side in ("source", "target")}
    return {**config, **both}


def freeze(model: keras.Model) -> None:
    """Let nothing of a model be trained; layer by layer, as one that was loaded frozen tells its layers nothing."""
    model.trainable = False
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            freeze(layer)
        layer.trainable = False


def bert_of(model: Bert | MaskedLm) -> Bert:
    """The BERT itself, without its head."""
    return model.bert if isinstance(model, MaskedLm) else model


def _scores(target: Bert | MaskedLm, *, tied: bool) -> Scores:
    """From the last hidden states to scores: by the BERT's own frozen head, if it has one, else by a new norm and bias.

    If `tied`, a score is how near a state is to a word's vector in the frozen table; otherwise a dense layer is learnt.
    """
    bert = bert_of(target)
    if isinstance(target, MaskedLm) and tied:
        return Scores((target.guess.dense, target.guess.norm), bert.embedding, target.bias)
    norm = keras.layers.LayerNormalization(epsilon=bert.sizes.epsilon, name=f"{bert.name}_output_norm")
    if tied:
        return Scores((norm,), bert.embedding, Bias(name=f"{bert.name}_output_bias"))
    return Scores((norm, keras.layers.Dense(bert.sizes.vocabulary, name=f"{bert.name}_output")))
