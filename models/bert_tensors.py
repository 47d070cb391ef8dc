"""Which tensor of a Hugging Face BERT is which variable of ours, and what is wrong where they do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from whale_nebula.errors import WeightsError

from .bert import Bert
from .masked_lm import MaskedLm

PREFIX = "bert."
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in files that were converted from TensorFlow's
_SHOWN = 3


class Place(NamedTuple):
    """A variable, and whether its tensor lies transposed in the file, as PyTorch keeps dense kernels."""

    variable: Any
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor in the file."""
        shape = tuple(self.variable.shape)
        return shape[::-1] if self.turned else shape

    def fill(self, tensor: np.ndarray) -> None:
        """Give the variable the file's numbers."""
        self.variable.assign(tensor.T if self.turned else tensor)

    def take(self) -> np.ndarray:
        """The variable's numbers, as the file holds them."""
        numbers = np.asarray(keras.ops.convert_to_numpy(self.variable))
        return np.ascontiguousarray(numbers.T if self.turned else numbers)


def places_of(bert: Bert) -> dict[str, Place]:
    """Every variable of a BERT by its tensor's name, without prefix.

    >>> from whale_nebula.models.bert import BertSizes
    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16))
    >>> places_of(bert)["encoder.layer.0.intermediate.dense.weight"].shape
    (16, 8)
    """
    table, pre = bert.embedding, bert.ending is not None
    found = {
        "embeddings.word_embeddings.weight": Place(table.tokens.embeddings),
        "embeddings.position_embeddings.weight": Place(table.positions.embeddings),
        "embeddings.token_type_embeddings.weight": Place(table.types.embeddings),
    }
    found |= {} if table.norm is None else _norm("embeddings.LayerNorm", table.norm)
    for number, (attention, inner) in enumerate(bert.sub_layers):
        at = f"encoder.layer.{number}"
        heads = attention.attention
        for name, layer in (("query", heads.query), ("key", heads.key), ("value", heads.value)):
            found |= _dense(f"{at}.attention.self.{name}", layer)
        found |= _dense(f"{at}.attention.output.dense", heads.out)
        found |= _norm(f"{at}.attention.ln" if pre else f"{at}.attention.output.LayerNorm", attention.norm)
        found |= _dense(f"{at}.intermediate.dense", inner.wide)
        found |= _dense(f"{at}.output.dense", inner.narrow)
        found |= _norm(f"{at}.ln" if pre else f"{at}.output.LayerNorm", inner.norm)
    return found | ({} if bert.ending is None else _norm("encoder.ln", bert.ending))


def head_places(model: MaskedLm) -> dict[str, Place]:
    """Those of the head that guesses tokens; its table is BERT's own."""
    at = "cls.predictions"
    transform = _dense(f"{at}.transform.dense", model.guess.dense)
    norm = _norm(f"{at}.transform.LayerNorm", model.guess.norm)
    return {**transform, **norm, f"{at}.bias": Place(model.bias.bias)}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Today's name, without prefix, of each name in a file.

    >>> plain_names(["bert.embeddings.LayerNorm.gamma", "cls.predictions.bias"])
    {'embeddings.LayerNorm.weight': 'bert.embeddings.LayerNorm.gamma', 'cls.predictions.bias': 'cls.predictions.bias'}
    """
    return {_today(name.removeprefix(PREFIX)): name for name in names}


def check_fit(places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse tensors that are not those of the places: missing, left over, or of another shape.

    What stands beside the encoder, a pooler or the head of some task, may be there and is not looked at.
    """
    missing = [name for name in places if name not in shapes]
    extra = [name for name in shapes if name not in places and _belongs(name)]
    wrong = [
        f"{name} {shapes[name]}, not {place.shape}"
        for name, place in places.items()
        if name in shapes and shapes[name] != place.shape
    ]
    for what, names in (("lacks", missing), ("has more tensors than config.json says:", extra)):
        if names:
            raise WeightsError(f"model.safetensors {what} {_some(names)}", where=where, why=_WHY)
    if wrong:
        raise WeightsError(f"model.safetensors has other shapes than config.json says: {_some(wrong)}", where=where)


_WHY = "config.json says which tensors there are"


def _belongs(name: str) -> bool:
    return name.startswith(("embeddings.", "encoder.")) and name != "embeddings.position_ids"


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _today(name: str) -> str:
    for old, new in _OLD_ENDINGS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _dense(at: str, layer: Any) -> dict[str, Place]:
    return {f"{at}.weight": Place(layer.kernel, turned=True), f"{at}.bias": Place(layer.bias)}


def _norm(at: str, layer: Any) -> dict[str, Place]:
    return {f"{at}.weight": Place(layer.gamma), f"{at}.bias": Place(layer.beta)}
