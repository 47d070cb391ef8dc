"""Many small tensors travel as a few larger ones: each exchange has its price, however little it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

BUCKET_BYTES = 1 << 21
"""Two buckets are on their way at the same time as a third is filled; see benchmarks/replica for other sizes."""


def buckets(dtypes: Sequence[str], sizes: Sequence[int], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Which tensors travel together: neighbours of the same dtype up to `limit` bytes, larger ones alone.

    >>> buckets(["float32", "int32", "float32"], [8, 4, 8], limit=16)
    [[0, 2], [1]]
    >>> buckets(["float32"] * 4, [8, 8, 8, 64], limit=16)
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    for number, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        bucket, held = filling.get(dtype, ([], limit))
        if held + size > limit:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(number)
        filling[dtype] = bucket, held + size
    return found


def apply_packed(
    tensors: Sequence[tf.Tensor], bucket: Sequence[int], do: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Do something to the tensors of a bucket as if they were one; gives each back in its own form."""
    chosen = [tensors[number] for number in bucket]
    if len(chosen) == 1:
        return [do(chosen[0])]
    packed = do(tf.concat([tf.reshape(tensor, [-1]) for tensor in chosen], 0))
    pieces = tf.split(packed, [count(tensor) for tensor in chosen])
    return [tf.reshape(piece, tensor.shape) for piece, tensor in zip(pieces, chosen, strict=True)]


def count(tensor: tf.Tensor) -> int:
    """How many numbers a tensor of known shape has."""
    return int(np.prod(tensor.shape.as_list(), dtype=np.int64))
