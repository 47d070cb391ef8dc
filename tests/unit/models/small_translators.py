"""Small translators with pairs for them: few layers, with weights that are far from zero."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

import whale_nebula as nb
from whale_nebula.models.abnet import CausalABNet, MaskedABNet
from whale_nebula.models.bert import Bert, BertSizes
from whale_nebula.models.masked_lm import masked_lm
from whale_nebula.models.sides import nowhere
from whale_nebula.models.translator import Translator

PAD, START, END, MASK, FIRST = 0, 1, 2, 3, 4
VOCABULARY, LENGTH = 12, 8
SOURCE = BertSizes(vocabulary=VOCABULARY, length=LENGTH, width=12, heads=3, layers=1, inner=16, dropout=0.0)
TARGET = BertSizes(vocabulary=VOCABULARY, length=LENGTH, width=8, heads=2, layers=1, inner=16, dropout=0.0)


def causal(around: Any = nowhere, **options: Any) -> CausalABNet:
    return CausalABNet(Bert(SOURCE, name="es"), Bert(TARGET, name="en"), inner=4, around=around, **options)


def cmlm(around: Any = nowhere, **options: Any) -> MaskedABNet:
    return MaskedABNet(Bert(SOURCE, name="es"), masked_lm(Bert(TARGET, name="en")), inner=4, around=around, **options)


def translator(around: Any = nowhere, **options: Any) -> Translator:
    return Translator(SOURCE, TARGET, around=around, **options)


MODELS: dict[str, Callable[..., Any]] = {"causal": causal, "translator": translator, "cmlm": cmlm}


def randomize_weights(model: keras.Model, spread: float = 0.5) -> None:
    """Adapters start near zero, where nothing that they do wrong is seen."""
    random = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(random.normal(0, spread, weight.shape))


def sources(rows: int = 5) -> np.ndarray:
    """Rows of one to six words, from start to end, filled up."""
    random, ids = np.random.default_rng(1), np.full((rows, LENGTH), PAD, np.int32)
    for row, words in enumerate(random.integers(1, 7, rows)):
        ids[row, : words + 2] = [START, *random.integers(FIRST, VOCABULARY, words), END]
    return ids


def pairs(rows: int = 5) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Sources and their translations: each word becomes the next one of the vocabulary."""
    ids = sources(rows)
    target = np.where(ids >= FIRST, FIRST + (ids - FIRST + 1) % (VOCABULARY - FIRST), ids)
    return {"source": ids, "target": target[:, :-1]}, target[:, 1:]


def stage_of_side(side: str) -> AbstractContextManager[Any]:
    return nb.stage(cluster=side)
