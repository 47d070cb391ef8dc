"""Scalars that go together: their bytes one after the other, and back. The plan knows what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.ir.spec import Spec


def bundled(tensors: Sequence[Any]) -> np.ndarray:
    """What is sent: one tensor as it is, the bytes of several scalars.

    >>> bundled([tf.constant(1.5), tf.constant(True)]).tolist()
    [0, 0, 192, 63, 1]
    """
    arrays = [tf.convert_to_tensor(tensor).numpy() for tensor in tensors]
    if len(arrays) == 1:
        return arrays[0]
    return np.frombuffer(b"".join(np.asarray(each).tobytes() for each in arrays), np.uint8)


def unbundled(array: Any, specs: Sequence[Spec]) -> Sequence[Any]:
    """The tensors that were bundled.

    >>> sent = bundled([tf.constant(1.5), tf.constant(True)])
    >>> [tensor.numpy().item() for tensor in unbundled(sent, [Spec("float32", ()), Spec("bool", ())])]
    [1.5, True]
    """
    if len(specs) == 1:
        return [tf.convert_to_tensor(array)]
    data, place = np.asarray(array).tobytes(), 0
    found: list[Any] = []
    for spec in specs:
        kind = tf.as_dtype(spec.dtype).as_numpy_dtype
        found.append(tf.convert_to_tensor(np.frombuffer(data, kind, 1, place)[0]))
        place += spec.nbytes()
    return found
