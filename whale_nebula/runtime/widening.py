"""Batches of many lengths: where only the sizes of axes differ, one program with free axes takes them all.

Keras's own functions do so (`reduce_retracing`): sentences that are padded to the longest of their batch would else be
captured and planned once for each length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from whale_nebula.capture.step import Signature


def takes(wide: Signature, layout: Signature) -> bool:
    """Whether a program of the form `wide` can be given a call of the form `layout`."""
    pairs = zip(wide.specs, layout.specs, strict=True)
    return _kind(wide) == _kind(layout) and all(_fits(free, spec.shape) for free, spec in pairs)


def widened(layout: Signature, known: Iterable[Signature]) -> Signature | None:
    """The form that takes `layout` and every known one that differs from it in sizes alone; None without such."""
    alike = [other for other in known if _kind(other) == _kind(layout)]
    if not alike:
        return None
    specs = layout.specs
    for other in alike:
        specs = tuple(_common(a, b) for a, b in zip(specs, other.specs, strict=True))
    return replace(layout, specs=specs, key=(layout.key[0], specs, *layout.key[2:]))


def _kind(layout: Signature) -> Any:
    """What two forms must share: everything but sizes."""
    return layout.key[0], tuple((spec.dtype, spec.shape.rank) for spec in layout.specs), *layout.key[2:]


def _fits(free: tf.TensorSpec, shape: tf.TensorShape) -> bool:
    return all(size is None or size == own for size, own in zip(free.shape, shape, strict=True))


def _common(a: tf.TensorSpec, b: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)], a.dtype)
