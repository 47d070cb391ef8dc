"""A tape around a call of a step: no gradient goes back through a plan, and who asks for one is told.

Between stages there is no op that a tape could follow, only what was planned: without this, some gradients would be
None and others, whose variables the tape knows of otherwise, those of the rest of the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.errors import GradientError
from whale_nebula.runtime.later import Later
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


def untaped(taped: bool) -> contextlib.AbstractContextManager[None]:
    """Around the running of a step: what a tape of the caller's sees of it would be parts."""
    return tf_private.unrecorded() if taped else contextlib.nullcontext()


def refusing(name: str, variables: Iterable[Any], given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results of step `name` for a caller whose tape records: numbers as they are, but with no way back.

    A gradient for one of the step's variables is refused, and one for what its arguments are made of; others pass.
    """
    fresh = [_fresh(result) for result in results]
    followed = [each for each in given if isinstance(each, tf.Tensor) and tf_private.tape_follows(each)]
    own = [variable for variable in variables if variable.trainable]
    handles = {id(variable.handle) for variable in own}

    def asked(sources: frozenset[int] | None) -> None:
        if followed or sources is None or not handles.isdisjoint(sources):
            raise _refusal(name)

    tf_private.tape_told(own, followed, [tensor for tensor in fresh if _differentiable(tensor)], asked)
    return fresh


def _fresh(result: Any) -> Any:
    """A tensor of its own for a result: it may be an argument that is handed back, or still on its way."""
    if not isinstance(result, tf.Tensor | Later) or not _differentiable(result):
        return result
    with tf_private.unrecorded():
        return tf.identity(result)


def _differentiable(result: Any) -> bool:
    return isinstance(result, tf.Tensor | Later) and bool(result.dtype.is_floating or result.dtype.is_complex)


def _refusal(name: str) -> GradientError:
    return GradientError(
        f"a tape around a call of {name} is asked for a gradient through it",
        where=str(script_site()),
        why=f"{name} runs by a plan, and a plan has the gradients that were asked for inside the step",
        mend=f"open the tape inside {name}, and return what you need: return loss, tape.gradient(loss, variables)\n"
        f"or, where none is to flow back, tf.stop_gradient(...) around the call of {name}",
    )
