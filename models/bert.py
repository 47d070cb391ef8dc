"""BERT: a bidirectional encoder, as one Keras model or sub-layer by sub-layer.

`Bert(sizes)` is a functional model from tokens to hidden states. Its layers are also available as `embedding`,
`sub_layers` and `ending`; a model that inserts layers between them shares their weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from whale_nebula.errors import OptionError, WeightsError

from .attention import check_heads
from .embedding import TokenEmbedding
from .layers import ACTIVATIONS, NORMS, FeedForward, Norm, SelfAttention, check_choice


@dataclass(frozen=True, slots=True)
class BertSizes:
    """The sizes and options of a BERT; the defaults are those of BERT-base.

    Args:
        vocabulary: number of tokens.
        length: maximum number of tokens in a row.
        width: size of the hidden states; a multiple of `heads`.
        heads: number of attention heads.
        layers: number of layers, each with attention and a feed-forward part.
        inner: width inside the feed-forward part.
        types: number of token types.
        norm: "post" normalises the sum of each sub-layer, as BERT does; "pre" normalises its input.
        dropout: dropout rate.
        attention_dropout: dropout rate of attention weights; `dropout` if None.
        activation: activation function, by its Hugging Face name.
        epsilon: epsilon of the norms.
        spread: standard deviation of initial weights.
        padding: id of the padding token.

    >>> BertSizes(vocabulary=1000, width=128, heads=4, layers=2, inner=512).norm
    'post'
    """

    vocabulary: int = 30522
    length: int = 512
    width: int = 768
    heads: int = 12
    layers: int = 12
    inner: int = 3072
    types: int = 2
    norm: Norm = "post"
    dropout: float = 0.1
    attention_dropout: float | None = None
    activation: str = "gelu"
    epsilon: float = 1e-12
    spread: float = 0.02
    padding: int = 0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "width", "heads", "layers", "inner", "types"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)!r} is less than 1", mend=f"{name}=1, or more")
        check_heads(self.width, self.heads)
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, tuple(ACTIVATIONS))

    @property
    def common(self) -> dict[str, Any]:
        """The options that all layers share."""
        return {"dropout": self.dropout, "epsilon": self.epsilon, "spread": self.spread}


class SubLayers(NamedTuple):
    """The two sub-layers of one layer of BERT."""

    attention: SelfAttention
    inner: FeedForward


@keras.saving.register_keras_serializable("whale_nebula")
class Visible(keras.layers.Layer):
    """The mask of tokens that are not padding (False for `padding`).

    >>> import numpy as np
    >>> Visible()(np.array([[7, 8, 0]])).numpy().tolist()
    [[True, True, False]]
    """

    def __init__(self, padding: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.padding = padding

    def call(self, tokens: Any) -> Any:
        """The mask of a batch of rows of tokens."""
        return ops.not_equal(tokens, self.padding)

    def compute_output_spec(self, tokens: Any) -> Any:
        """The output's shape and type, without tracing the layer."""
        return keras.KerasTensor(tokens.shape, "bool")

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {**super().get_config(), "padding": self.padding}


@keras.saving.register_keras_serializable("whale_nebula")
class Bert(keras.Model):
    """BERT as a functional Keras model: int32 tokens (rows, length) in, hidden states (rows, length, width) out.

    Rows may have any length up to `sizes.length`. The names of all layers start with the model's name, so that two
    BERTs with different names can be part of one model.

    Args:
        sizes: a `BertSizes`.
        name: name of the model, and prefix of its layers' names.
        trainable: whether its layers are trained.

    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=2, inner=16), name="source")
    >>> bert.output.shape, [layer.name for layer in bert.layers[3:5]]
    ((None, None, 8), ['source_attention0', 'source_inner0'])
    """

    def __init__(self, sizes: BertSizes, *, name: str = "bert", trainable: bool = True, **kwargs: Any) -> None:
        tokens = keras.Input((None,), dtype="int32", name=f"{name}_tokens")
        parts = _build_parts(sizes, name)
        hidden, visible = parts["embedding"](tokens), parts["visible"](tokens)
        for attention, inner in parts["sub_layers"]:
            hidden = inner(attention(hidden, visible))
        super().__init__(tokens, parts["ending"](hidden) if parts["ending"] else hidden, name=name, **kwargs)
        self._sizes = asdict(sizes)
        self.trainable = trainable  # Keras's constructor would not apply it to the layers

    @property
    def sizes(self) -> BertSizes:
        """The sizes of the model."""
        return BertSizes(**self._sizes)

    @property
    def visible(self) -> Visible:
        """The layer that computes the mask of tokens."""
        return self.get_layer(f"{self.name}_visible")

    @property
    def embedding(self) -> TokenEmbedding:
        """The first layer: the embedding of tokens."""
        return self.get_layer(f"{self.name}_embedding")

    @property
    def sub_layers(self) -> tuple[SubLayers, ...]:
        """The sub-layers between embedding and ending, layer by layer."""
        return tuple(
            SubLayers(self.get_layer(f"{self.name}_attention{i}"), self.get_layer(f"{self.name}_inner{i}"))
            for i in range(self._sizes["layers"])
        )

    @property
    def ending(self) -> keras.layers.LayerNormalization | None:
        """The norm after all sub-layers of a pre-normalised BERT; a post-normalised one has none."""
        return self.get_layer(f"{self.name}_ending") if self._sizes["norm"] == "pre" else None

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {"sizes": dict(self._sizes), "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Bert:
        """Create an equal one."""
        return cls(BertSizes(**config["sizes"]), name=config["name"], trainable=config["trainable"])


def _build_parts(sizes: BertSizes, name: str) -> dict[str, Any]:
    """All layers of a BERT, not yet connected."""
    pre = sizes.norm == "pre"
    return {
        "visible": Visible(sizes.padding, name=f"{name}_visible"),
        "embedding": TokenEmbedding(
            *(sizes.vocabulary, sizes.length, sizes.width),
            types=sizes.types,
            norm=not pre,
            **sizes.common,
            name=f"{name}_embedding",
        ),
        "sub_layers": [
            (_build_attention(sizes, f"{name}_attention{i}"), _build_feed_forward(sizes, f"{name}_inner{i}"))
            for i in range(sizes.layers)
        ],
        "ending": keras.layers.LayerNormalization(epsilon=sizes.epsilon, name=f"{name}_ending") if pre else None,
    }


def _build_attention(sizes: BertSizes, name: str) -> SelfAttention:
    dropout = sizes.dropout if sizes.attention_dropout is None else sizes.attention_dropout
    return SelfAttention(
        sizes.width, sizes.heads, norm=sizes.norm, attention_dropout=dropout, **sizes.common, name=name
    )


def _build_feed_forward(sizes: BertSizes, name: str) -> FeedForward:
    return FeedForward(
        sizes.width, sizes.inner, activation=sizes.activation, norm=sizes.norm, **sizes.common, name=name
    )


NORM_OF: dict[str, Norm] = {"bert": "post", "megatron-bert": "pre"}
"""The position of the norm, by Hugging Face's type of a model."""
WHOLE_NUMBERS = {  # Hugging Face's names of required integers, and ours
    "vocab_size": "vocabulary",
    "max_position_embeddings": "length",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "intermediate_size": "inner",
    "type_vocab_size": "types",
}
DEFAULTS: dict[str, tuple[str, Any]] = {  # Hugging Face's names of optional keys; our names, and default values
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("epsilon", 1e-12),
    "initializer_range": ("spread", 0.02),
    "pad_token_id": ("padding", 0),
}
ACTIVATION_OF = {"gelu_pytorch_tanh": "gelu_new"}


def read_sizes(config: dict[str, Any], where: str = "config.json") -> BertSizes:
    """Read the sizes from Hugging Face's configuration of a BERT; `where` is the file, for errors.

    >>> read_sizes(make_config(BertSizes(vocabulary=100, width=8, heads=2))).vocabulary
    100
    """
    kind = config.get("model_type", "bert")
    if kind not in NORM_OF:
        raise WeightsError(
            f"the folder contains a model of type {kind!r}, not a BERT",
            where=where,
            mend=f"use a model whose model_type is {' or '.join(map(repr, NORM_OF))}",
        )
    _check_positions(config, where)
    options: dict[str, Any] = {ours: config.get(theirs, value) for theirs, (ours, value) in DEFAULTS.items()}
    options |= {ours: _read_whole_number(config, theirs, where) for theirs, ours in WHOLE_NUMBERS.items()}
    options["activation"] = ACTIVATION_OF.get(options["activation"], options["activation"])
    try:
        return BertSizes(**options, norm=NORM_OF[kind])
    except OptionError as error:
        raise WeightsError(f"config.json does not describe a BERT: {error.what}", where=where, why=error.why) from None


def make_config(sizes: BertSizes, architecture: str = "BertModel") -> dict[str, Any]:
    """Hugging Face's configuration for these sizes."""
    attention_dropout = sizes.dropout if sizes.attention_dropout is None else sizes.attention_dropout
    pre = sizes.norm == "pre"
    return {
        "architectures": [architecture.replace("Bert", "MegatronBert") if pre else architecture],
        "model_type": next(kind for kind, norm in NORM_OF.items() if norm == sizes.norm),
        "position_embedding_type": "absolute",
        **{theirs: getattr(sizes, ours) for theirs, ours in WHOLE_NUMBERS.items()},
        **{theirs: getattr(sizes, ours) for theirs, (ours, _) in DEFAULTS.items()},
        "attention_probs_dropout_prob": attention_dropout,
    }


def _read_whole_number(config: dict[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        fault = f"has {name}: {value!r}, which is not an integer" if name in config else f"lacks {name}"
        raise WeightsError(f"config.json {fault}", where=where, why="config.json defines the size of the model")
    return value


def _check_positions(config: dict[str, Any], where: str) -> None:
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise WeightsError(
            f"this BERT has position embeddings of type {kind!r}",
            where=where,
            why="only absolute position embeddings (one vector per position) are supported",
            mend='use a model whose position_embedding_type is "absolute"',
        )
