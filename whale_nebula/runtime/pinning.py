"""Hold a step that was just captured against its pinned plan, before anything of it runs."""

from __future__ import annotations

import tensorflow as tf

from whale_nebula.capture.step import Captured, Signature
from whale_nebula.runtime.run import current_run


def check_pinned(name: str, captured: Captured, layout: Signature) -> None:
    """Refuse a step that is not planned as it was pinned; without pins do nothing."""
    pins = current_run().pins
    pin = pins.pin_of(name)
    if pin is not None:
        from whale_nebula.runtime.plan_step import planned  # it plans by the engine, which imports this

        pins.check(planned(name, captured, [_example(spec) for spec in layout.specs]), pin)
    elif pins and any(stage.where for stage in captured.program.stages):
        pins.miss(name)


def _example(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([1 if axis is None else axis for axis in spec.shape], spec.dtype)
