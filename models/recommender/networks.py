"""Networks that predict clicks: wide and deep, DLRM, and multi-view.

Each takes `{"numbers": float32 [rows, numbers], "ids": int64 [rows, fields]}` and returns a logit for each row. The
embedding is passed in; it maps [rows, fields] to [rows, fields, width]: a `keras.layers.Embedding` for small ids, a
`HashedEmbedding` or a `SplitEmbedding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from whale_nebula.errors import DataError, OptionError


def wide_and_deep(
    embedding: Callable[[Any], Any],
    wide: Callable[[Any], Any],
    *,
    fields: int,
    numbers: int,
    deep: Sequence[int] = (64, 32),
) -> keras.Model:
    """Wide and deep: a linear part with a weight for each id, plus a network on embeddings.

    Args:
        embedding: layer from ids to vectors.
        wide: an embedding of width 1, for the weights of ids.
        fields: number of ids in a row.
        numbers: number of dense numbers in a row.
        deep: widths of the hidden layers.
    """
    dense, ids = _inputs(fields, numbers)
    hidden = keras.layers.Concatenate(name="joined")([dense, keras.layers.Flatten(name="flat")(embedding(ids))])
    hidden = _stack(hidden, deep, "deep")
    weights = keras.layers.Flatten(name="wide_flat")(wide(ids))
    parts = [keras.layers.Dense(1, name="deep_logit")(hidden), Sum(name="wide_logit")(weights)]
    parts.append(keras.layers.Dense(1, use_bias=False, name="numbers_logit")(dense))
    return keras.Model({"numbers": dense, "ids": ids}, keras.layers.Add(name="click")(parts), name="wide_and_deep")


def dlrm(
    embedding: Callable[[Any], Any],
    *,
    fields: int,
    numbers: int,
    width: int,
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
) -> keras.Model:
    """DLRM: a network maps the numbers to a vector; inner products of all pairs of vectors go to the top layers.

    Args:
        embedding: layer from ids to vectors.
        fields: number of ids in a row.
        numbers: number of dense numbers in a row.
        width: width of the vectors of `embedding`.
        bottom: widths of the layers on the numbers, without the last one.
        top: widths of the layers on the products.
    """
    dense, ids = _inputs(fields, numbers)
    vector, found = _stack(dense, [*bottom, width], "bottom"), embedding(ids)
    if found.shape[-1] != width:
        name = getattr(embedding, "name", "the embedding")
        raise OptionError(
            f"width={width!r} of dlrm does not match vectors of width {found.shape[-1]} from {name!r}",
            why="dot products need vectors of equal width",
            mend=f"width={found.shape[-1]}",
        )
    vectors = keras.layers.Concatenate(axis=1, name="vectors")(
        [keras.layers.Reshape((1, width), name="bottom_vector")(vector), found]
    )
    joined = keras.layers.Concatenate(name="joined")([vector, PairProducts(name="products")(vectors)])
    click = keras.layers.Dense(1, name="click")(_stack(joined, top, "top"))
    return keras.Model({"numbers": dense, "ids": ids}, click, name="dlrm")


def multi_view(
    embedding: Callable[[Any], Any],
    *,
    views: Sequence[Sequence[int]],
    fields: int,
    numbers: int,
    tower: Sequence[int] = (64, 32),
) -> keras.Model:
    """Multi-view: a tower for each group of fields; the logit is the similarity of the other towers to the first.

    The first view also gets the numbers.

    Args:
        embedding: layer from ids to vectors.
        views: for each tower the fields that it sees; at least two.
        fields: number of ids in a row.
        numbers: number of dense numbers in a row.
        tower: widths of the layers of a tower.
    """
    if len(views) < 2 or not all(views):
        raise OptionError(
            f"views={views!r} has fewer than two views", mend="views=[[0, 1], [2, 3]]: two or more, none empty"
        )
    beyond = sorted({each for view in views for each in view if not 0 <= each < fields})
    if beyond:
        raise OptionError(
            f"a view has field {beyond[0]}, but there are only {fields} fields", mend=f"use fields 0 to {fields - 1}"
        )
    dense, ids = _inputs(fields, numbers)
    vectors = embedding(ids)
    ends = []
    for at, view in enumerate(views):
        flat = keras.layers.Flatten(name=f"view{at}_flat")(Fields(view, name=f"view{at}_fields")(vectors))
        if at == 0:
            flat = keras.layers.Concatenate(name="view0_joined")([dense, flat])
        ends.append(_stack(flat, tower, f"view{at}", activation="tanh"))
    near = [keras.layers.Dot(1, normalize=True, name=f"near{at}")([ends[0], end]) for at, end in enumerate(ends[1:], 1)]
    joined = near[0] if len(near) == 1 else keras.layers.Concatenate(name="near")(near)
    click = keras.layers.Dense(1, name="click")(joined)
    return keras.Model({"numbers": dense, "ids": ids}, click, name="multi_view")


@keras.saving.register_keras_serializable("whale_nebula")
class Sum(keras.layers.Layer):
    """The sum of a row, as one column."""

    def call(self, inputs: Any) -> Any:
        """[rows, n] becomes [rows, 1]."""
        return ops.sum(inputs, axis=-1, keepdims=True)


@keras.saving.register_keras_serializable("whale_nebula")
class PairProducts(keras.layers.Layer):
    """The inner products of all pairs of a row's vectors: [rows, n, width] becomes [rows, n * (n - 1) / 2]."""

    def call(self, inputs: Any) -> Any:
        """The products below the diagonal, row by row."""
        count = inputs.shape[1]
        products = ops.matmul(inputs, ops.transpose(inputs, (0, 2, 1)))
        below = [one * count + other for one in range(count) for other in range(one)]
        return ops.take(ops.reshape(products, (-1, count * count)), below, axis=1)


@keras.saving.register_keras_serializable("whale_nebula")
class Fields(keras.layers.Layer):
    """Selection of fields: [rows, fields, width] becomes [rows, len(chosen), width]."""

    def __init__(self, chosen: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.chosen = list(chosen)

    def call(self, inputs: Any) -> Any:
        """The chosen fields, in order."""
        return ops.take(inputs, self.chosen, axis=1)

    def get_config(self) -> dict[str, Any]:
        """The options to create an equal layer."""
        return {**super().get_config(), "chosen": self.chosen}


def _inputs(fields: int, numbers: int) -> tuple[Any, Any]:
    if fields < 1 or numbers < 1:
        raise OptionError(
            f"fields={fields!r}, numbers={numbers!r}: a row needs inputs", mend="use at least one field and one number"
        )
    return keras.Input((numbers,), name="numbers"), keras.Input((fields,), dtype="int64", name="ids")


def _stack(inputs: Any, widths: Sequence[int], name: str, activation: str = "relu") -> Any:
    for at, width in enumerate(widths):
        inputs = keras.layers.Dense(width, activation=activation, name=f"{name}{at}")(inputs)
    return inputs


def auc(predicted: ArrayLike, clicked: ArrayLike) -> float:
    """The exact area under the ROC curve: how often a clicked row is predicted above a row that is not clicked.

    Equal predictions count as one half.

    >>> auc([0.9, 0.4, 0.6, 0.1], [1, 0, 1, 0]), auc([0.5, 0.5], [1, 0])
    (1.0, 0.5)
    """
    scores, labels = np.asarray(predicted).reshape(-1), np.asarray(clicked).reshape(-1)
    if len(scores) != len(labels):
        raise DataError(
            f"{len(scores)} predictions and {len(labels)} labels cannot be compared",
            mend="pass predictions and labels of the same rows",
        )
    hits = int(np.sum(labels == 1))
    misses = int(np.sum(labels == 0))
    if hits + misses != len(labels) or not hits or not misses:
        raise DataError(
            f"AUC is undefined: {hits} rows with label 1 and {misses} with label 0, of {len(labels)}",
            why="it compares positive rows with negative rows",
            mend="pass labels 0 and 1, with rows of both",
        )
    if not np.isfinite(scores).all():
        raise DataError("a prediction is not finite, so rows cannot be ranked", mend="use a smaller learning rate")
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[places]  # from 1; equal predictions share the mean of theirs
    return float((ranks[labels == 1].sum() - hits * (hits + 1) / 2) / (hits * misses))
