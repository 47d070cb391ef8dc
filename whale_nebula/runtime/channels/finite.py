"""A NaN or an infinity is caught before it enters what a channel remembers: the run stops, or the step is left out.

What keeps nothing lets it pass, as it would uncompressed: whoever scales his loss looks for it. Where the user says
`nonfinite="skip"`, every tensor of the boundary is looked at, and a step in which one is not finite is left out. In
an evaluation there is nothing to leave out: there such a tensor crosses as it is, and nothing is remembered of it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.codec.objects import Codec, Dims
from whale_nebula.codec.way import Way
from whale_nebula.errors import NonFiniteError
from whale_nebula.runtime.channels.coding import own_structure
from whale_nebula.runtime.channels.state import At

SKIP = "skip"


def watched(way: Way, codec: Codec | None, dims: Dims, at: At, *, back: bool) -> bool:
    """Whether a tensor is looked at, which takes a pass over it."""
    return (at.training and way.nonfinite == SKIP) or _remembers(way, codec, dims, back=back)


def is_whole(x: Any) -> bool:
    """Whether all numbers of a tensor are finite.

    >>> is_whole(tf.constant([1.0, 2.0])), is_whole(tf.constant([1.0, float("inf")])), is_whole(tf.zeros([0]))
    (True, False, True)
    """
    return not x.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(x)))


def left_out(way: Way, boundary: str, stage: str, at: At) -> str:
    """Why the step is to be left out, in words; where it must not be, the error that stops the run. Nothing in an
    evaluation.
    """
    if not at.training:
        return ""
    if way.nonfinite != SKIP:
        raise NonFiniteError(
            f"{boundary} has a NaN or an infinity",
            boundary=boundary,
            stage=stage,
            step=at.step + 1,
            micro_batch=at.micro_batch,
            why="it would stay in what both sides of this boundary remember, and spoil all steps after this one",
        )
    return f"{boundary} has a NaN or an infinity in micro-batch {at.micro_batch} of stage {stage!r}"


def _remembers(way: Way, codec: Codec | None, dims: Dims, *, back: bool) -> bool:
    if codec is None:
        return False
    structure = own_structure(codec, back=back)
    if structure is not None and not structure.careful and (structure.init(dims) is not None or structure.news(dims)):
        return True
    return way.delta is not None and not back
