"""Scalars that go together: their bytes one after the other, and back. The plan knows what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.spec import Spec


def packed(tensors: Sequence[Any]) -> np.ndarray:
    """The bytes of scalars, one after the other.

    >>> packed([tf.constant(1.5), tf.constant(True)]).tolist()
    [0, 0, 192, 63, 1]
    """
    arrays = (tf.convert_to_tensor(tensor).numpy() for tensor in tensors)
    return np.frombuffer(b"".join(np.asarray(each).tobytes() for each in arrays), np.uint8)


def unpacked(array: Any, specs: Sequence[Spec]) -> list[Any]:
    """The scalars whose bytes these are.

    >>> sent = packed([tf.constant(1.5), tf.constant(True)])
    >>> [tensor.numpy().item() for tensor in unpacked(sent, [Spec("float32", ()), Spec("bool", ())])]
    [1.5, True]
    """
    data, place = np.asarray(array).tobytes(), 0
    found: list[Any] = []
    for spec in specs:
        kind = tf.as_dtype(spec.dtype).as_numpy_dtype
        found.append(tf.convert_to_tensor(np.frombuffer(data, kind, 1, place)[0]))
        place += spec.nbytes()
    return found


def bundled(tensors: Sequence[Any]) -> np.ndarray:
    """What is sent: one tensor as it is, the bytes of several scalars.

    >>> bundled([tf.constant([2.0])]).tolist(), len(bundled([tf.constant(1.5), tf.constant(True)]))
    ([2.0], 5)
    """
    if len(tensors) > 1:
        return packed(tensors)
    found: np.ndarray = tf.convert_to_tensor(tensors[0]).numpy()
    return found


def unbundled(array: Any, specs: Sequence[Spec]) -> Sequence[Any]:
    """The tensors that were bundled.

    >>> [tensor.numpy().tolist() for tensor in unbundled(bundled([tf.constant([2.0])]), [Spec("float32", (1,))])]
    [[2.0]]
    """
    return unpacked(array, specs) if len(specs) > 1 else [tf.convert_to_tensor(array)]
