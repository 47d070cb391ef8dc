"""The distinct ids of a batch, who holds the row of each, and the gather that makes vectors of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .hashing import mix


class Distinct(NamedTuple):
    """The ids that one table looks up, how often each comes, and the place of the row of every id of the batch."""

    ids: np.ndarray
    seen: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class Parts:
    """Which of `count` tables holds an id: the first one those of `hot`, if there are any, the others by its hash."""

    count: int = 1
    hot: tuple[int, ...] = ()

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """The number of the table of each id."""
        hashed = (mix(ids) >> np.uint64(40)).astype(np.int64)  # the low bits are those of a table's index
        if not self.hot:
            return hashed % self.count
        hot = np.array(self.hot, np.int64)
        places = np.minimum(np.searchsorted(hot, ids), len(hot) - 1)
        return np.where(hot[places] == ids, 0, 1 + hashed % max(self.count - 1, 1))


def find_distinct(flat: np.ndarray, parts: Parts = Parts(), part: int = 0) -> Distinct:
    """The distinct ids that a part holds. Places count through the rows of all parts, each in the order of ids; those
    of the first part are for all ids, and others have none.
    """
    if part:
        ids, seen = np.unique(flat[parts.owners_of(flat) == part], return_counts=True)
        return Distinct(ids, seen, np.zeros(0, np.int32))
    ids, places, seen = np.unique(flat, return_inverse=True, return_counts=True)
    if parts.count == 1:
        return Distinct(ids, seen, places.astype(np.int32))
    owners = parts.owners_of(ids)
    ranks = np.empty(len(ids), np.int32)
    ranks[np.argsort(owners, kind="stable")] = np.arange(len(ids), dtype=np.int32)
    return Distinct(ids[owners == 0], seen[owners == 0], ranks[places])


def gather_rows(rows: Sequence[Any], places: Any) -> Any:
    """The row at each place of these rows one after the other; gradients of a row are summed, and go back as one."""

    @tf.custom_gradient
    def gather(*rows: Any) -> Any:
        joined = rows[0] if len(rows) == 1 else tf.concat(rows, 0)

        def sum_gradients(gradient: Any) -> Any:
            parts = tf.cast(tf.reshape(gradient, [-1, rows[0].shape[-1]]), tf.float32)
            sums = tf.math.unsorted_segment_sum(parts, tf.reshape(places, [-1]), tf.shape(joined)[0])
            return sums if len(rows) == 1 else tf.split(sums, [tf.shape(each)[0] for each in rows])

        return tf.gather(joined, places), sum_gradients

    return gather(*rows)
