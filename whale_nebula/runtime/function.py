"""`nb.function`: the counterpart of `tf.function` for custom loops and inference, executed by a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whale_nebula.capture.step import bind
from whale_nebula.capture.tracing import current_trace, is_uncut_on_purpose
from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean, list_names
from whale_nebula.runtime.step.step import Arguments, Step, Unpack
from whale_nebula.scopes import options as values
from whale_nebula.scopes.observer import observer
from whale_nebula.scopes.options import check_signature
from whale_nebula.site import calling_site, script_site, short_traceback, warn_at
from whale_nebula.tf import private as tf_private


@tf_private.exempt_from_autograph
class NebulaFunction:
    """A step of a custom loop; call it like the function that it wraps."""

    def __init__(self, fn: Callable[..., Any], whole: Iterable[str]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._is_checked = False
        name = getattr(fn, "__name__", type(fn).__name__)
        self._step = Step(tf_private.apply_autograph(fn), name=name, whole=frozenset(whole), lazy=True)

    @short_traceback
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; the first call with each signature captures and plans it. Called inside another step, it
        becomes part of that step.
        """
        if current_trace() is not None or is_uncut_on_purpose():
            return self._step.fn(*args, **kwargs)
        results = self._step.run(*self.arguments(*args, **kwargs))
        if not self._is_checked:
            self._is_checked = True
            self._warn_uncut()
        return results

    def _warn_uncut(self) -> None:
        """After the first call: warn once of a function that runs uncut because it enters no stage."""
        made = self._step.last if observer() is None else None
        if made is None or made.cut.program.pipeline.micro_batch > 1 or made.cut.program.has_scopes:
            return
        warn_at(
            script_site(),
            f"{self._step.name} under @nb.function runs uncut",
            why="no nb.stage was entered in it, and no layer in it was built inside one; this is reported once",
            mend='use with nb.stage(cluster="gpu"): around each of its parts; or @tf.function, if it is to run uncut',
        )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Arguments, Unpack]:
        """The arguments of a call by name, and the function that makes arguments of a call from their values."""
        try:
            found = bind(self._fn, args, kwargs)
        except TypeError as error:
            raise TypeError(f"{self._step.name}{inspect.signature(self._fn)}: {error}") from None
        return found, functools.partial(_bind_call, self._fn, [name for name, _ in found])

    @property
    def step(self) -> Step:
        """The underlying step, for planning and verification."""
        return self._step


def _bind_call(fn: Callable[..., Any], names: list[str], values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The positional and keyword arguments that bind these values to these parameters."""
    bound = inspect.BoundArguments(inspect.signature(fn), dict(zip(names, values, strict=True)))
    return bound.args, bound.kwargs


@check_signature
def function(fn: Callable[..., Any] | None = None, *, whole: Iterable[str] = ()) -> Any:
    """Run a function with a plan: `@nb.function` replaces `@tf.function`.

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
            f"whole={whole!r} is a string",
            where=str(calling_site()),
            why="it must be a list of argument names",
            mend=f"nb.function(whole=({whole!r},))",
        )
    if fn is None:
        return functools.partial(function, whole=tuple(whole))
    if not callable(fn):
        raise values.option_error(
            f"nb.function takes a function, not {type(fn).__name__} {fn!r}",
            mend="write @nb.function above the function, or @nb.function(whole=('table',))",
        )
    return NebulaFunction(fn, _check_names(fn, whole))


def _check_names(fn: Callable[..., Any], whole: Iterable[str]) -> tuple[str, ...]:
    """The names in `whole`; raises if one is not the name of an argument."""
    parameters = inspect.signature(fn).parameters.values()
    known = [each.name for each in parameters]
    names = tuple(whole)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise values.option_error(
            f"whole={names!r} names {unknown!r}, but {name} has no such argument",
            why=f"its arguments are {list_names(known)}",
            mend=did_you_mean(unknown, known),
        )
    return names
