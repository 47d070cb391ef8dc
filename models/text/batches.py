"""Encoded pairs in an order become what `fit` takes; a cluster that has one side yields None for the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from whale_nebula.errors import DataError, OptionError

from .encoded import Encoded, Ids
from .order import MULTIPLE, Order


def batches(
    encoded: Encoded,
    order: Order,
    *,
    multiple: int = MULTIPLE,
    weights: bool = False,
) -> Any:
    """A `tf.data.Dataset` of `({"source": ids, "target": shown ids}, labels)`, one element a batch of the order.

    The label of each place of a target is the id after it, so what is shown goes to the last word, labels to the end.

    Each side is filled up with 0 to the next multiple of its own longest row, so no cluster needs to know the
    lengths of the other's. Where a side is not here its leaves are None; say their forms in the config's `inputs`:
    `x/source` and `x/target`, `y`, and `sample_weight` if `weights` asks for it (1 where a label is not 0).

    An order of several epochs is one dataset: `fit(..., epochs=order.epochs, steps_per_epoch=order.steps_per_epoch)`.

    >>> from .order import make_order
    >>> pairs = Encoded(Ids.of_rows([[2, 7, 3]]), Ids.of_rows([[2, 8, 9, 3]]))
    >>> for inputs, labels in batches(pairs, make_order(1, batch=1), multiple=4):
    ...     print(inputs["source"].numpy(), inputs["target"].numpy(), labels.numpy())
    [[2 7 3 0]] [[2 8 9 3]] [[8 9 3 0]]
    """
    _check(encoded, order, multiple)
    import tensorflow as tf

    rows = tf.RaggedTensor.from_row_lengths(
        np.concatenate([np.asarray(each, np.int32) for each in order.batches]), [len(each) for each in order.batches]
    )

    def batch(rows: Any) -> tuple[Any, ...]:
        source = None if encoded.source is None else _filled(encoded.source, rows, multiple)
        if encoded.target is None:
            return ({"source": source, "target": None}, None, *([None] if weights else []))
        ids = _filled(encoded.target, rows, multiple, extra=1)
        shown, labels = ids[:, :-1], ids[:, 1:]
        weight = [tf.cast(labels != 0, tf.float32)] if weights else []
        return ({"source": source, "target": shown}, labels, *weight)

    dataset = tf.data.Dataset.from_tensor_slices(rows)
    plain = tf.autograph.experimental.do_not_convert(batch)  # there is nothing in it to convert
    return dataset.map(plain, num_parallel_calls=1).prefetch(2)


def _check(encoded: Encoded, order: Order, multiple: int) -> None:
    if multiple < 1:
        raise OptionError(f"multiple={multiple!r} is no length", mend="multiple=8")
    for side, ids in (("source", encoded.source), ("target", encoded.target)):
        if ids is not None and len(ids) != order.rows:
            raise DataError(
                f"an order of {order.rows} rows and {len(ids)} {side} sentences do not fit",
                why="every cluster must have the same rows, in the same order, each on its own side",
                mend="make the order anew, or take the files of all clusters from the same release of the text",
            )


def _filled(ids: Ids, rows: Any, multiple: int, extra: int = 0) -> Any:
    """These rows of a side, as one tensor: all as long as the next multiple of the longest, and `extra` longer."""
    import tensorflow as tf

    found = tf.gather(tf.RaggedTensor.from_row_lengths(ids.flat, ids.lengths), rows)
    need = tf.maximum(tf.cast(tf.reduce_max(found.row_lengths()), tf.int32) - extra, 1)
    length = (need + multiple - 1) // multiple * multiple
    length = (length if ids.longest is None else tf.minimum(length, ids.longest)) + extra
    filled = found.to_tensor(0)
    return tf.pad(filled, [[0, 0], [0, length - tf.shape(filled)[1]]])
