"""The shapes of the first batch: where a later step fails on other ones, that is probably why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whale_nebula.spec import Spec

Shapes = tuple[tuple[int | None, ...] | None, ...]


def shapes_of(tensors: Sequence[Any]) -> Shapes:
    """The shapes of a batch's tensors; None where there is no tensor."""
    return tuple(_shape(tensor) for tensor in tensors)


def _shape(tensor: Any) -> tuple[int | None, ...] | None:
    shape = getattr(tensor, "shape", None)
    return None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape)


def changed(names: Sequence[str], tensors: Sequence[Any], first: Shapes) -> str:
    """In words, the first input whose rows are not shaped like those of the first batch; nothing where all are.

    >>> import numpy as np
    >>> changed(["x"], [np.ones((32, 5), "float32")], ((64, 8),))
    "input 'x' is float32[32,5] in this batch, and was [64,8] in the first"
    """
    for name, tensor, before in zip(names, tensors, first, strict=False):
        now = _shape(tensor)
        if before is not None and now is not None and (len(now) != len(before) or now[1:] != before[1:]):
            dtype = getattr(tensor.dtype, "name", str(tensor.dtype))
            said = str(Spec("", before)).replace(" ", "")
            return f"input {name!r} is {Spec(dtype, now)} in this batch, and was {said} in the first"
    return ""
