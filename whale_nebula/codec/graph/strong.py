"""The rows of a matrix that have the largest norms: chosen on the host, which has to pack the choice anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.bytes.rows import Mask
from whale_nebula.errors import RemoteProtocolError


def strongest(x: Any, k: int) -> Mask:
    """Which `k` rows of `x` [m, n] have the largest norms. Of equal ones the first; what is not finite is larger still.

    >>> strongest(tf.constant([[3.0, 4.0], [1.0, 1.0], [0.0, 6.0]]), 2).tolist()
    [True, False, True]
    """
    wide = np.asarray(x).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.einsum("ij,ij->i", wide, wide)
    order = np.argsort(-np.where(np.isnan(norms), np.inf, norms), kind="stable")
    marks = np.zeros(len(wide), np.bool_)
    marks[order[:k]] = True
    return marks


def taken(x: Any, marks: Mask) -> Any:
    """These rows, in their order.

    >>> taken(tf.constant([[1.0], [2.0], [3.0]]), np.array([True, False, True])).numpy().tolist()
    [[1.0], [3.0]]
    """
    return tf.gather(x, np.flatnonzero(marks))


def placed(rows: Any, marks: Mask) -> Any:
    """The matrix that is zero but for these rows.

    >>> placed(tf.constant([[1.0], [3.0]]), np.array([True, False, True])).numpy().tolist()
    [[1.0], [0.0], [3.0]]
    """
    places = np.flatnonzero(marks)
    if len(places) != rows.shape[0]:
        raise RemoteProtocolError(f"{rows.shape[0]} rows came under a mask that marks {len(places)}")
    return tf.scatter_nd(places[:, None], rows, [len(marks), rows.shape[1]])


def mingled(strong: Any, weak: Any, marks: Mask) -> Any:
    """The matrix of which these are the marked rows and the others.

    >>> mingled(tf.constant([[1.0], [3.0]]), tf.constant([[2.0]]), np.array([True, False, True])).numpy().tolist()
    [[1.0], [2.0], [3.0]]
    """
    places = np.concatenate([np.flatnonzero(marks), np.flatnonzero(~marks)])
    return tf.gather(tf.concat([strong, weak], axis=0), np.argsort(places))
