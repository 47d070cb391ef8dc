"""A tape of a step is asked inside the step. Asked later it knows the trace's tensors alone, and says so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from whale_nebula.errors import GradientError
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

_QUESTIONS = ("gradient", "jacobian", "batch_jacobian")


def tell_later(tapes: Iterable[Any]) -> None:
    """The trace has ended: let those of its tapes that can still be asked say why there is no answer."""
    for tape in tapes:
        for question in _QUESTIONS if tf_private.tape_open(tape) else ():
            setattr(tape, question, partial(_asked, tape, question))


def _asked(tape: Any, question: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return getattr(tf.GradientTape, question)(tape, *args, **kwargs)
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise _late() from error


def _late() -> GradientError:
    return GradientError(
        "a tape of a step is asked after the step",
        where=str(script_site()),
        why="it has seen the tensors of the trace, which have no values outside of it",
        mend="ask inside the step, and return the answer: return loss, tape.gradient(loss, variables)",
    )
