"""Embeddings in other clusters, in one table or several by id, of which only distinct rows are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from whale_nebula.errors import OptionError

from .distinct import Distinct, Partition, find_distinct, gather_rows
from .hashed_embedding import HashedEmbedding


@keras.saving.register_keras_serializable("whale_nebula")
class DistinctRows(HashedEmbedding):
    """The rows of a table's distinct ids, and the place of each id of the batch among those of all tables.

    Integers [...] give rows [distinct, width] and places [...], from which `GatherRows` builds vectors. `part` of
    `parts` tables holds its ids by hash; with `hot`, the first part holds these ids and no others. The places are those
    of part 0.
    """

    def __init__(self, width: int, *, part: int = 0, parts: int = 1, hot: ArrayLike = (), **options: Any) -> None:
        super().__init__(width, **options)
        self.hot = np.unique(np.asarray(hot, np.int64))
        if not 0 <= part < parts or (len(self.hot) and parts < 2):
            suffix = " with hot ids" if len(self.hot) else ""
            raise OptionError(
                f"part={part!r} of parts={parts!r}{suffix} is not a valid part of a table",
                mend="part=0, parts=2: an index below the number of parts, which is at least 2 with hot ids",
            )
        self.part, self.parts = part, parts
        self._partition = Partition(parts, tuple(self.hot.tolist()))

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        """The rows of the ids that this table holds, and, for part 0, the place of each id."""
        rows, places = self.look_up(inputs, training)
        if self.part == 0:
            places = tf.ensure_shape(tf.reshape(places, tf.shape(inputs)), inputs.shape)
        return rows, tf.ensure_shape(places, inputs.shape if self.part == 0 else [None])

    def compute_output_spec(self, inputs: Any, training: bool | None = False) -> Any:
        """Shapes and types; the number of rows is known only in a step."""
        self.check_ids(inputs)
        places = inputs.shape if self.part == 0 else (None,)
        return keras.KerasTensor((None, self.width), dtype="float32"), keras.KerasTensor(places, dtype="int32")

    def get_config(self) -> dict[str, Any]:
        """The options to recreate the layer, without its rows."""
        return {**super().get_config(), "part": self.part, "parts": self.parts, "hot": self.hot.tolist()}

    def _find_distinct(self, flat: np.ndarray) -> Distinct:
        return find_distinct(flat, self._partition, self.part)


@keras.saving.register_keras_serializable("whale_nebula")
class GatherRows(keras.layers.Layer):
    """Gathers vectors of rows: places [...] and the rows [distinct, width] of each table give [..., width].

    The backward pass sums the gradients of each row, so that one gradient for each row is sent back.
    """

    def call(self, inputs: Any) -> Any:
        """A row for each place."""
        places, *rows = inputs
        return tf.cast(gather_rows(rows, places), self.compute_dtype)

    def compute_output_spec(self, inputs: Any) -> Any:
        """The shape of the places with the axis of the width."""
        return keras.KerasTensor((*inputs[0].shape, inputs[1].shape[-1]), dtype=self.compute_dtype)


class SplitEmbedding:
    """An embedding like `HashedEmbedding` with tables in other clusters, of which only distinct rows are sent.

    Each table is a separate layer that holds its ids by hash: `{name}0`, `{name}1`, ... Place these layers elsewhere,
    and keep the layer `{name}_gather` with the dense part.

    Args:
        width: width of the vectors.
        tables: number of tables.
        hot: ids whose rows stay next to the dense part, in one more layer, `{name}_near`; see `most_frequent`.
        name: prefix of the layers' names.
        options: further options of `HashedEmbedding`.

    >>> embedding = SplitEmbedding(4, tables=2, optimizer="sgd")
    >>> embedding(keras.Input((3,), dtype="int64")).shape, [each.name for each in embedding.layers]
    ((None, 3, 4), ['table0', 'table1'])
    """

    def __init__(
        self, width: int, *, tables: int = 1, hot: ArrayLike = (), name: str = "table", **options: Any
    ) -> None:
        if not isinstance(tables, int) or tables < 1:
            raise OptionError(f"tables={tables!r} is less than 1", mend="tables=1, or more")
        near = int(np.size(hot) > 0)
        names = [f"{name}_near"] * near + [f"{name}{at}" for at in range(tables)]
        self.layers: Sequence[DistinctRows] = [
            DistinctRows(width, part=at, parts=len(names), hot=hot, name=each, **options)
            for at, each in enumerate(names)
        ]
        self._gather = GatherRows(name=f"{name}_gather")

    def __call__(self, ids: Any) -> Any:
        """The vectors of ids, in a functional model."""
        pulled = [layer(ids) for layer in self.layers]
        return self._gather([pulled[0][1], *(rows for rows, _ in pulled)])


def most_frequent(ids: ArrayLike, count: int) -> np.ndarray:
    """The most frequent of these ids, at most `count`: for `SplitEmbedding(hot=...)`.

    >>> most_frequent([[5, 7], [7, 9], [9, 7]], 2)
    array([7, 9])
    """
    found, times = np.unique(np.asarray(ids, np.int64), return_counts=True)
    return np.asarray(np.sort(found[np.argsort(-times, kind="stable")[:count]]))
