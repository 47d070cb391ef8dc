"""Values of all micro-batches become one, by the rule that the plan gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def merge(rule: str, values: Sequence[Any], shares: Sequence[Any]) -> Any:
    """One value from a micro-batch's each.

    >>> float(merge("mean", [tf.constant(1.0), tf.constant(4.0)], [0.25, 0.75]))
    3.25
    """
    if len(values) == 1 or rule in ("only", "same"):
        return values[0]
    if rule == "last":
        return values[-1]
    if rule == "sum":
        return added(values)
    if rule == "mean":
        return added([value * tf.cast(share, value.dtype) for value, share in zip(values, shares, strict=True)])
    if rule.startswith("vector:"):
        rules = rule.partition(":")[2].split(",")
        flat = [tf.unstack(tf.reshape(value, [len(rules)])) for value in values]
        merged = [merge(each, pieces, shares) for each, *pieces in zip(rules, *flat, strict=True)]
        return tf.reshape(tf.stack(merged), tf.shape(values[0]))
    return tf.concat(values, int(rule.partition(":")[2] or 0))


def added(values: Sequence[Any]) -> Any:
    """The sum, in the order given: bits must not depend on the schedule."""
    first = values[0]
    for value in values[1:]:
        first = first + value
    return first
