"""A step that is left out: it runs to its end, for its results, and nothing of what it wrote stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def taken_back(variables: Sequence[Any]) -> Iterator[None]:
    """Around an update whose results are wanted and whose effects are not: all variables get their values back.

    >>> import tensorflow as tf
    >>> weight = tf.Variable(1.0)
    >>> with taken_back([weight]):
    ...     shown = float(weight.assign(float("nan")))
    >>> float(weight)
    1.0
    """
    saved = [(variable, variable.read_value()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)
