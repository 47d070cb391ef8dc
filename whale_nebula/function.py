"""`nb.function`: like tf.function, for a custom loop or for inference, run by a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whale_nebula import tf_private
from whale_nebula.capture.step import bind
from whale_nebula.errors import OptionError
from whale_nebula.runtime.step import Arguments, Step, Unpack


class NebulaFunction:
    """A step of a custom loop; call it as the function that it wraps."""

    def __init__(self, fn: Callable[..., Any], whole: Iterable[str]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._step = Step(tf_private.autographed(fn), name=fn.__name__, whole=frozenset(whole))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; the first call with each form of arguments captures and plans it."""
        return self._step.run(*self.arguments(*args, **kwargs))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Arguments, Unpack]:
        """The arguments of a call by their names, and what turns their values into a call again."""
        found = bind(self._fn, args, kwargs)
        return found, functools.partial(_call, self._fn, [name for name, _ in found])

    @property
    def step(self) -> Step:
        """The step behind it, for planning and verification."""
        return self._step


def _call(
    fn: Callable[..., Any], names: list[str], values: list[Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The call that binds these values to these parameters."""
    bound = inspect.BoundArguments(inspect.signature(fn), dict(zip(names, values, strict=True)))
    return bound.args, bound.kwargs


def function(fn: Callable[..., Any] | None = None, *, whole: Iterable[str] = ()) -> Any:
    """Run a function by a plan: `@nb.function` stands where `@tf.function` stood.

    Every tensor argument of rank 1 or more is a batch along its first axis, except those named in `whole`.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> @nb.function
    ... def double(x):
    ...     with nb.stage(cluster="gpu"):
    ...         return 2.0 * x
    >>> double(tf.constant([1.0, 2.0])).numpy().tolist()
    [2.0, 4.0]
    """
    if isinstance(whole, str):
        raise OptionError(
            f"whole={whole!r} is a string", why="it lists argument names", mend=f"nb.function(whole=({whole!r},))"
        )
    if fn is None:
        return functools.partial(function, whole=tuple(whole))
    return NebulaFunction(fn, whole)
