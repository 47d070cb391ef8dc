"""Shorten tracebacks of this package's errors, so that they end at the user's line.

As those of Keras and TensorFlow, they are whole again after `keras.config.disable_traceback_filtering()`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from whale_nebula.errors import NebulaError

P = ParamSpec("P")
T = TypeVar("T")


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Let errors of ours that a public call raises begin at that call.

    >>> @short_traceback
    ... def call():
    ...     raise NebulaError("no")
    >>> try: call()
    ... except NebulaError as error: print(error.__traceback__.tb_next.tb_next)
    None
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except NebulaError as error:
            keras = sys.modules.get("keras")
            if keras is not None and not keras.config.is_traceback_filtering_enabled():
                raise
            raise error.with_traceback(None)  # noqa: B904 - it is the same error

    return wrapper
