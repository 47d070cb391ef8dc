"""`nb.place`: assign a model's layers to clusters by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whale_nebula.errors.tracebacks import short_traceback
from whale_nebula.scopes.frames import current_stack
from whale_nebula.scopes.options import check_signature
from whale_nebula.scopes.placing import placement


@check_signature
@short_traceback
def place(model: Any, mapping: Mapping[str, Any]) -> None:
    """Give a model's layers to clusters by their paths; its code stays as it is.

    `nb.place(model, {"encoder/.*": "gpu", "decoder/.*": "npu"})`

    A path is the names of layers from the model to the layer, as `model.summary(expand_nested=True)` shows them:
    "encoder/block0/attention". A pattern is a regex that must match a whole path; what is inside a layer goes with it.
    A pattern that matches no layer, or a layer that two patterns match, is an error. Layers that are not named run
    where the fewest bytes cross. A cluster's name is the name of its stage; where a cluster has two stages, give the
    second as `nb.stage(cluster="gpu", name="head")`.

    Scopes that are open here, `nb.cluster`, `nb.pipeline` and `nb.compress`, stand around the stages. Calling it again
    replaces the map, from the next step on; an empty one takes it away. Copies and saved models do not have it.

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
    made = placement(mapping)
    recorder = current_stack().recorder
    if recorder is not None:
        words = [f"{rule.pattern.pattern}={rule.key}" for rule in made.rules]
        recorder.statement(" ".join(["place", *words]), made.frames, None)
        return
    from whale_nebula.capture import placed  # only a model brings TensorFlow with it

    placed.place(model, made)
