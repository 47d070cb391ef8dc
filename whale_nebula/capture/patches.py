"""A reference-counted, thread-safe hook on a TensorFlow function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from whale_nebula.errors import GradientError
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


class Hook:
    """`put` sets the hook, again for everybody who needs it; `take` takes it off when the last of them is done.

    >>> hook = Hook(lambda: print("on"), lambda: print("off"))
    >>> with hook.held(), hook.held():
    ...     print("traced")
    on
    on
    traced
    off
    """

    def __init__(self, put: Callable[[], None], take: Callable[[], None]) -> None:
        self._put = put
        self._take = take
        self._lock = threading.Lock()
        self._held = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The hook is on inside, however what is inside ends."""
        with self._lock:
            self._held += 1
            self._put()
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                if self._held == 0:
                    self._take()


_QUESTIONS = ("gradient", "jacobian", "batch_jacobian")


def tell_later(tapes: Iterable[Any]) -> None:
    """The trace has ended: let those of its tapes that can still be asked say why there is no answer."""
    for tape in tapes:
        for question in _QUESTIONS if tf_private.tape_open(tape) else ():
            setattr(tape, question, partial(_ask_tape, tape, question))


def _ask_tape(tape: Any, question: str, *args: Any, **kwargs: Any) -> Any:
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
