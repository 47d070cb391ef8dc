"""Everything private of Keras and TensorFlow that synchronized moments need, beside `tf_private`.

Keras asks one function of its TensorFlow backend for the moments of `BatchNormalization(synchronized=True)`: without a
`tf.distribute` strategy they are those of the batch. Each function here has a contract test in tests/contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whale_nebula.tf.patch import Patch
from whale_nebula.tf.versions import require_supported

require_supported()  # what follows is where it is in these versions only

from keras.src.backend.tensorflow import nn  # noqa: E402

_compute = nn._compute_moments_sync

Answer = Callable[[Any, Sequence[int], bool], tuple[Any, Any] | None]


def patch_moments(answer: Answer) -> Patch:
    """Ask `answer(tensor, axes, keepdims)` for the mean and the variance of synchronized moments.

    Where it is None, Keras goes on.
    """

    def compute(x: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
        found = answer(x, axes, keepdims)
        return _compute(x, axes, keepdims) if found is None else found

    return Patch(nn, "_compute_moments_sync", compute)


def unmark(op: Any, name: str) -> None:
    """Take an attribute off an op of the graph being traced."""
    op._clear_attr(name)


def readers(tensor: Any) -> list[tuple[Any, int]]:
    """The ops of a graph that read a tensor, each with the number of the input where it does."""
    found = dict.fromkeys(tensor.consumers())
    return [(op, place) for op in found for place, read in enumerate(op.inputs) if read is tensor]
