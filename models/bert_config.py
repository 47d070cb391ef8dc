"""`config.json` of a Hugging Face BERT, read as `BertSizes` and written from them.

The post-normalised form is their `bert`, the pre-normalised one their `megatron-bert`.
"""

from __future__ import annotations

from typing import Any

from whale_nebula.errors import OptionError, WeightsError

from .bert import BertSizes
from .layers import Norm

NORM_OF: dict[str, Norm] = {"bert": "post", "megatron-bert": "pre"}
# their name: ours
WHOLE_NUMBERS = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "length",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "intermediate_size": "inner",
    "type_vocab_size": "types",
}
# these have values that are meant where none is written
USUAL: dict[str, tuple[str, Any]] = {
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("epsilon", 1e-12),
    "initializer_range": ("spread", 0.02),
    "pad_token_id": ("padding", 0),
}
ACTIVATION_OF = {"gelu_pytorch_tanh": "gelu_new"}


def sizes_of(config: dict[str, Any], where: str = "config.json") -> BertSizes:
    """The sizes that a configuration says.

    >>> sizes_of(config_of(BertSizes(vocabulary=100, width=8, heads=2))).vocabulary
    100
    """
    kind = config.get("model_type", "bert")
    if kind not in NORM_OF:
        raise WeightsError(
            f"this folder holds a model of kind {kind!r}, not a BERT",
            where=where,
            mend=f"take one whose model_type is {' or '.join(map(repr, NORM_OF))}",
        )
    _check_positions(config, where)
    said: dict[str, Any] = {ours: config.get(theirs, value) for theirs, (ours, value) in USUAL.items()}
    said |= {ours: _read_whole_number(config, theirs, where) for theirs, ours in WHOLE_NUMBERS.items()}
    said["activation"] = ACTIVATION_OF.get(said["activation"], said["activation"])
    try:
        return BertSizes(**said, norm=NORM_OF[kind])
    except OptionError as error:
        raise WeightsError(f"config.json describes no BERT: {error.what}", where=where, why=error.why) from None


def config_of(sizes: BertSizes, architecture: str = "BertModel") -> dict[str, Any]:
    """The configuration of these sizes, so that others can load them too."""
    attention_dropout = sizes.dropout if sizes.attention_dropout is None else sizes.attention_dropout
    pre = sizes.norm == "pre"
    return {
        "architectures": [architecture.replace("Bert", "MegatronBert") if pre else architecture],
        "model_type": next(kind for kind, norm in NORM_OF.items() if norm == sizes.norm),
        "position_embedding_type": "absolute",
        **{theirs: getattr(sizes, ours) for theirs, ours in WHOLE_NUMBERS.items()},
        **{theirs: getattr(sizes, ours) for theirs, (ours, _) in USUAL.items()},
        "attention_probs_dropout_prob": attention_dropout,
    }


def _read_whole_number(config: dict[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        said = f"has {name}: {value!r}, which is no whole number" if name in config else f"does not say {name}"
        raise WeightsError(f"config.json {said}", where=where, why="it says how large the model is")
    return value


def _check_positions(config: dict[str, Any], where: str) -> None:
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise WeightsError(
            f"this BERT has positions of kind {kind!r}",
            where=where,
            why="only a table of positions, one vector for each, can be loaded",
            mend='take one whose position_embedding_type is "absolute"',
        )
