"""The distinct ids of a batch, the table that holds each, and the gather from rows to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .hashing import mix


class Distinct(NamedTuple):
    """The ids that one table looks up, the count of each, and the place of the row of each id of the batch."""

    ids: np.ndarray
    seen: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class Partition:
    """A partition of ids over `count` tables: by hash, or with `hot` ids (sorted) these in the first table, and all
    others in the rest by hash.
    """

    count: int = 1
    hot: tuple[int, ...] = ()

    def find_owners(self, ids: np.ndarray) -> np.ndarray:
        """The number of the table of each id."""
        hashed = (mix(ids) >> np.uint64(40)).astype(np.int64)  # a table's index uses the low bits
        if not self.hot:
            return hashed % self.count
        hot = np.array(self.hot, np.int64)
        places = np.minimum(np.searchsorted(hot, ids), len(hot) - 1)
        return np.where(hot[places] == ids, 0, 1 + hashed % max(self.count - 1, 1))


def find_distinct(flat: np.ndarray, partition: Partition = Partition(), table: int = 0) -> Distinct:
    """The distinct ids of a table. Places count through the rows of all tables, each in the order of ids; only the
    result for table 0 has them.
    """
    if table:
        ids, seen = np.unique(flat[partition.find_owners(flat) == table], return_counts=True)
        return Distinct(ids, seen, np.zeros(0, np.int32))
    ids, places, seen = np.unique(flat, return_inverse=True, return_counts=True)
    if partition.count == 1:
        return Distinct(ids, seen, places.astype(np.int32))
    owners = partition.find_owners(ids)
    ranks = np.empty(len(ids), np.int32)
    ranks[np.argsort(owners, kind="stable")] = np.arange(len(ids), dtype=np.int32)
    return Distinct(ids[owners == 0], seen[owners == 0], ranks[places])


def gather_rows(rows: Sequence[Any], places: Any) -> Any:
    """Gather rows by place from the concatenation of these rows; the gradients of a row are summed."""

    @tf.custom_gradient
    def gather(*rows: Any) -> Any:
        joined = rows[0] if len(rows) == 1 else tf.concat(rows, 0)

        def sum_gradients(gradient: Any) -> Any:
            parts = tf.cast(tf.reshape(gradient, [-1, rows[0].shape[-1]]), tf.float32)
            sums = tf.math.unsorted_segment_sum(parts, tf.reshape(places, [-1]), tf.shape(joined)[0])
            return sums if len(rows) == 1 else tf.split(sums, [tf.shape(each)[0] for each in rows])

        return tf.gather(joined, places), sum_gradients

    return gather(*rows)
