"""Capture a user's training step: trace it once, and build a Program from it."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from whale_nebula.scopes import options
from whale_nebula.scopes.options import check_signature
from whale_nebula.scopes.placement import parse_placement
from whale_nebula.site import short_traceback


@check_signature
def loss_weight(tensor: Any) -> Any:
    """Declare the weight of this micro-batch inside a step; returns the tensor.

    The weight must depend only on the step's inputs, because the share of every micro-batch must be known before the
    first one starts. Without micro-batches it has no effect.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> float(nb.loss_weight(tf.constant(3.0)))
    3.0
    """
    from whale_nebula.capture.tracing import current_trace

    trace = current_trace()
    if trace is not None:
        trace.loss_weights.append(_convert_weight(tensor))
    return tensor


def _convert_weight(tensor: Any) -> Any:
    """The argument of `loss_weight` as a tensor; raises if it is not numeric."""
    import tensorflow as tf

    try:
        found = tf.convert_to_tensor(tensor)
    except (TypeError, ValueError):
        found = None
    if found is None or not (found.dtype.is_floating or found.dtype.is_integer or found.dtype.is_bool):
        raise options.option_error(
            f"nb.loss_weight({shorten(repr(tensor), 50)}): the argument is not numeric",
            why="the argument is the weight of this micro-batch in the loss",
            mend="nb.loss_weight(tf.reduce_sum(mask))",
        )
    return found


@check_signature
@short_traceback
def place(model: Any, mapping: Mapping[str, Any]) -> None:
    """Assign a model's layers to clusters by their paths; its code is unchanged.

    `nb.place(model, {"encoder/.*": "gpu", "decoder/.*": "npu"})`

    A path consists of the names of the layers from the model to the layer, as `model.summary(expand_nested=True)` shows
    them: "encoder/block0/attention". A pattern is a regex that must match a complete path; it also selects the layers
    inside. A pattern that matches no layer, or a layer that two patterns match, is an error. Layers that no pattern
    matches run where the fewest bytes cross. A cluster's name is the name of its stage; if a cluster has two stages,
    write the second as `nb.stage(cluster="gpu", name="head")`. With `nb.split(...)` instead of a cluster, the variables
    of these layers are sharded in the stage where they are.

    Scopes that are open at the call (`nb.cluster`, `nb.pipeline` and `nb.compress`) enclose the stages. Another call
    replaces the map, from the next step on; an empty map removes it. Copies and saved models do not include the map.

    >>> import keras
    >>> import whale_nebula as nb
    >>> inputs = keras.Input((4,))
    >>> hidden = keras.layers.Dense(8, name="encoder")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(1, name="decoder")(hidden))
    >>> with nb.cluster(), nb.pipeline(micro_batch=2):
    ...     nb.place(model, {"encoder": "gpu", "decoder": "npu"})
    >>> plan = nb.plan(model, keras.KerasTensor((8, 4)))
    >>> list(plan.stages), plan.rows
    (['gpu', 'npu'], (4, 4))
    """
    placement = parse_placement(mapping)
    from whale_nebula.capture import layer_placement  # a model implies TensorFlow

    layer_placement.place(model, placement)
