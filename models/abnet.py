"""ABNet: a translator built from two frozen, pretrained BERTs, with trainable adapters after each of their sub-layers.

The two BERTs can be pretrained separately, the source's in one cluster and the target's in another. Both stay frozen;
only the layers between their sub-layers are trained:

    source ids ─ embedding ─[ attention ─ adapter ─ feed-forward ─ adapter ]× ─ hidden states
                                                                                     │  the slow link
    shown ids ── embedding ─[ attention ─ adapter ─ feed-forward ─ adapter ]× ─ scores of the next word

Each adapter of the source side is a norm and two dense layers. Each adapter of the target side starts with
cross-attention to the source's hidden states. `CausalABNet` decodes from left to right and applies causal attention in
the target's bidirectional BERT. `MaskedABNet` is a conditional masked language model and keeps that BERT bidirectional,
as it was pretrained: it predicts hidden words (`masking.Hiding`) and the number of words, which it computes from the
source's hidden states because nothing marks the end of a sentence.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import keras
from keras import ops

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

from .adapters import DecoderAdapter, EncoderAdapter
from .bert import Bert
from .decoder import Decoder, Scores
from .decoding import Found, MaskPredict, mask_predicted
from .encoder import Encoder, Source
from .masked_lm import Bias, MaskedLm
from .sides import Around, Sides, Translating, check_names, nowhere


class Adapters(NamedTuple):
    """Options of adapters: `inner` is the width between the two dense layers, `dropout` the dropout rate."""

    inner: int = 512
    dropout: float = 0.0


def build_source_side(bert: Bert, adapters: Adapters) -> Encoder:
    """The source's BERT, frozen, with an `EncoderAdapter` after each sub-layer."""
    freeze(bert)
    layers: list[keras.layers.Layer] = []
    for layer in (layer for both in bert.sub_layers for layer in both):
        layers += [layer, EncoderAdapter(bert.sizes.width, **adapters._asdict(), name=f"{layer.name}_adapter")]
    return Encoder(bert.visible, bert.embedding, tuple(layers), bert.ending)


def build_target_side(target: Bert | MaskedLm, adapters: Adapters, *, tied: bool, causal: bool) -> Decoder:
    """The target's BERT, frozen, with a `DecoderAdapter` after each sub-layer, and logits over its vocabulary."""
    freeze(target)
    bert, layers = find_bert(target), list[keras.layers.Layer]()
    for layer in (layer for both in bert.sub_layers for layer in both):
        name = f"{layer.name}_adapter"
        layers += [layer, DecoderAdapter(bert.sizes.width, bert.sizes.heads, **adapters._asdict(), name=name)]
    layers += [] if bert.ending is None else [bert.ending]
    return Decoder(
        bert.embedding, tuple(layers), _build_scores(target, tied=tied), visible=None if causal else bert.visible
    )


def serialize_sides(source: Bert, target: Bert | MaskedLm) -> dict[str, Any]:
    """The config entries of the two BERTs."""
    serialized = keras.saving.serialize_keras_object
    return {"source": serialized(source), "target": serialized(target)}


def freeze(model: keras.Model) -> None:
    """Freeze all layers of a model individually: a model that was loaded frozen does not pass the setting on to its
    layers.
    """
    model.trainable = False
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            freeze(layer)
        layer.trainable = False


def find_bert(model: Bert | MaskedLm) -> Bert:
    """The BERT without its head."""
    return model.bert if isinstance(model, MaskedLm) else model


def _build_scores(target: Bert | MaskedLm, *, tied: bool) -> Scores:
    """The layers from the last hidden states to logits: the BERT's own frozen head, if it has one, otherwise a new norm
    and bias.

    If `tied`, logits are products with the words' vectors in the frozen table; otherwise of a new dense layer.
    """
    bert = find_bert(target)
    if isinstance(target, MaskedLm) and tied:
        return Scores((target.guess.dense, target.guess.norm), bert.embedding, target.bias)
    norm = keras.layers.LayerNormalization(epsilon=bert.sizes.epsilon, name=f"{bert.name}_output_norm")
    if tied:
        return Scores((norm,), bert.embedding, Bias(name=f"{bert.name}_output_bias"))
    return Scores((norm, keras.layers.Dense(bert.sizes.vocabulary, name=f"{bert.name}_output")))


@keras.saving.register_keras_serializable("whale_nebula")
class CausalABNet(Translating):
    """An ABNet that decodes from left to right.

    Inputs are `{"source": ids, "target": ids with the start token}`; the output is the logits of the next word at each
    position.

    Args:
        source: the BERT of the source language; its layers are frozen.
        target: the BERT of the target language, frozen too. With its head (`masked_lm`), that frozen head computes the
            logits.
        inner: width between the two dense layers of an adapter.
        dropout: dropout rate of the adapters.
        tied: for a target without a head: compute logits with the BERT's frozen token table instead of a new dense
            layer.
        around: called with "source" and "target"; returns the scope to build that side in, such as `nb.stage`.
        name: name of the model.

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
        check_names(source, find_bert(target))
        adapters = Adapters(inner, dropout)
        encoder, decoder = (
            build_source_side(source, adapters),
            build_target_side(target, adapters, tied=tied, causal=True),
        )
        config = {**serialize_sides(source, target), **adapters._asdict(), "tied": tied, "name": name}
        super().__init__(Sides(encoder, decoder, around), config)


@keras.saving.register_keras_serializable("whale_nebula")
class LengthScores(keras.layers.Layer):
    """Predicts the number of words of a translation, up to `longest`: logits from the mean of the source's hidden
    states.

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
        """Create the weights."""
        self.dense.build((hidden_shape[0], hidden_shape[2]))

    def call(self, hidden: Any, visible: Any) -> Any:
        """The logits of a batch of sources."""
        counted = ops.cast(visible, hidden.dtype)[:, :, None]
        words = ops.maximum(ops.sum(counted, axis=1), 1)
        return self.dense(ops.sum(hidden * counted, axis=1) / words)

    def compute_mask(self, hidden: Any, previous_mask: Any = None) -> None:
        """No mask, as a row has a single length."""

    def get_config(self) -> dict[str, Any]:
        """The options to recreate the layer."""
        return {**super().get_config(), "longest": self.longest}


@keras.saving.register_keras_serializable("whale_nebula")
class MaskedABNet(Translating):
    """An ABNet that predicts all hidden words of a translation at once (a conditional masked language model).

    Inputs are `{"source": ids, "target": ids, some of them hidden}`; outputs are `{"words": logits of all positions,
    "length": logits of the number of words}`. Decoding is by `MaskPredict`. If the target is a `masked_lm`, its head
    predicts hidden words as in pretraining.

    Args:
        source: the BERT of the source language; its layers are frozen.
        target: the BERT of the target language, frozen too, with or without its head (`masked_lm`).
        inner: width between the two dense layers of an adapter.
        dropout: dropout rate of the adapters.
        tied: for a target without a head: compute logits with the BERT's frozen token table instead of a new dense
            layer.
        longest: maximum number of words of a translation; by default two less than the positions of the target's BERT.
        around: called with "source" and "target"; returns the scope to build that side in, such as `nb.stage`.
        name: name of the model.

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
        bert = find_bert(target)
        check_names(source, bert)
        adapters = Adapters(inner, dropout)
        encoder, decoder = (
            build_source_side(source, adapters),
            build_target_side(target, adapters, tied=tied, causal=False),
        )
        lengths = LengthScores(longest or bert.sizes.length - 2, name=f"{bert.name}_length")
        config = {
            **serialize_sides(source, target),
            **adapters._asdict(),
            "tied": tied,
            "longest": longest,
            "name": name,
        }
        super().__init__(Sides(encoder, decoder, around), config, lengths)

    @property
    def lengths(self) -> LengthScores:
        """The layer that predicts the number of words of a translation."""
        return next(layer for layer in self.layers if isinstance(layer, LengthScores))

    def find(self, source: Source, search: MaskPredict) -> Found:
        """Search by mask-predict, for several lengths at once."""
        return mask_predicted(self.sides.decoder, source, self.lengths(*source), search)


Objective = Literal["causal", "cmlm"]
_KINDS: dict[str, type[CausalABNet] | type[MaskedABNet]] = {"causal": CausalABNet, "cmlm": MaskedABNet}


def ABNet(
    source: Bert, target: Bert | MaskedLm, *, objective: Objective = "causal", **options: Any
) -> CausalABNet | MaskedABNet:
    """Create a `CausalABNet` or a `MaskedABNet`.

    Args:
        source: the BERT of the source language.
        target: the BERT of the target language, with or without its head (`masked_lm`).
        objective: "causal" decodes from left to right, "cmlm" predicts hidden words.
        options: further arguments of the selected class.

    >>> from .bert import BertSizes
    >>> sizes = BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16)
    >>> model = ABNet(Bert(sizes, name="es"), Bert(sizes, name="en"), objective="cmlm", inner=4)
    >>> type(model).__name__, model.searched_by.__name__
    ('MaskedABNet', 'MaskPredict')
    """
    if objective not in _KINDS:
        raise OptionError(
            f"objective={objective!r} is not a valid value", mend=did_you_mean(str(objective), list(_KINDS))
        )
    return _KINDS[objective](source, target, **options)
