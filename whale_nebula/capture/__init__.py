"""Capture a user's training step: trace it once, and make a Program of it."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

from whale_nebula.scopes import options
from whale_nebula.scopes.options import check_signature


@check_signature
def loss_weight(tensor: Any) -> Any:
    """Inside a step: this micro-batch counts by this much; gives the tensor back.

    It must come from the step's inputs alone, because every micro-batch's share has to be known before the first
    one starts. Without micro-batches it changes nothing.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> float(nb.loss_weight(tf.constant(3.0)))
    3.0
    """
    from whale_nebula.capture.tracing import current

    trace = current()
    if trace is not None:
        trace.weights.append(_number(tensor))
    return tensor


def _number(tensor: Any) -> Any:
    """What a weight is given as: a tensor of numbers, or something that becomes one."""
    import tensorflow as tf

    try:
        found = tf.convert_to_tensor(tensor)
    except (TypeError, ValueError):
        found = None
    if found is None or not (found.dtype.is_floating or found.dtype.is_integer or found.dtype.is_bool):
        raise options.refuse(
            f"nb.loss_weight({shorten(repr(tensor), 50)}) is given no numbers",
            why="it says how much this micro-batch counts",
            mend="nb.loss_weight(tf.reduce_sum(mask))",
        )
    return found
