"""Datasets that announce the ids of later steps to tables of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from .hashed_embedding import HashedEmbedding
from .split_embedding import SplitEmbedding


def look_ahead(
    dataset: tf.data.Dataset,
    *embeddings: HashedEmbedding | SplitEmbedding,
    ids: Callable[..., Any] = lambda inputs, *_: inputs["ids"],
    steps: int = 1,
) -> tf.data.Dataset:
    """Prefetch a dataset, and look up the ids of each element when it is prefetched.

    Announced ids are compared with those of the step, and rows that were updated in between are read again, so results
    do not change. Only tables in this process look ahead, and only for steps of one micro-batch.

    Args:
        dataset: the dataset.
        embeddings: the layers whose rows are looked up.
        ids: returns, from the parts of an element, the ids with which the layers are called.
        steps: number of steps to prefetch.

    >>> data = tf.data.Dataset.from_tensor_slices(({"ids": np.arange(6).reshape(2, 3)}, np.zeros(2))).batch(1)
    >>> [len(element) for element in look_ahead(data, HashedEmbedding(4))]
    [2, 2]
    """
    layers = [layer for each in embeddings for layer in (each.layers if isinstance(each, SplitEmbedding) else [each])]

    def announce(rows: np.ndarray) -> np.ndarray:
        for layer in layers:
            layer.steps.announce(rows)
        return rows

    def announce_ids(*element: Any) -> Any:
        flat = tf.reshape(tf.cast(ids(*element), tf.int64), [-1])
        with tf.control_dependencies([tf.numpy_function(announce, [flat], tf.int64)]):
            announced = tf.nest.map_structure(tf.identity, element)
        return announced if len(announced) > 1 else announced[0]

    return dataset.map(announce_ids).prefetch(steps)
