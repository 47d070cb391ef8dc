"""Which models a step is about: those that it calls, and those that its function knows by name.

A model that `fit`s is a step's own. A custom loop's models are met where they are called while it is traced; one that
holds them, and is only there to be saved, is met where the function finds it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import keras

from whale_nebula.tf import private as tf_private

_LOCK = threading.Lock()
_LOCAL = threading.local()
_open = 0
_plain = tf_private.KerasLayer.__call__


@functools.wraps(_plain)  # AutoGraph goes by its module: it leaves Keras's own functions as they are
def _called(model: Any, *args: Any, **kwargs: Any) -> Any:
    met: list[Any] | None = getattr(_LOCAL, "met", None)
    if met is not None and all(model is not known for known in met):
        met.append(model)
    return tf_private.KerasLayer.__call__(model, *args, **kwargs)


@contextlib.contextmanager
def models_met() -> Iterator[list[Any]]:
    """Gather the models that this thread calls inside, each once. Keras is then as it was."""
    global _open
    before, _LOCAL.met = getattr(_LOCAL, "met", None), []
    with _LOCK:
        _open += 1
        keras.Model.__call__ = _called
    try:
        yield _LOCAL.met
    finally:
        _LOCAL.met = before
        with _LOCK:
            _open -= 1
            if _open == 0:
                del keras.Model.__call__


def models_of(fn: Callable[..., Any]) -> list[Any]:
    """The models that a function reads by their names, or that the object holds whose method it is.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> [found is model for found in models_of(lambda x: model(x))]
    [True]
    """
    owner = getattr(fn, "__self__", None)
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    code: CodeType | None = getattr(fn, "__code__", None)
    named = {} if code is None else {name: fn.__globals__.get(name) for name in _names(code)}
    cells = [] if code is None else [cell.cell_contents for cell in fn.__closure__ or () if _filled(cell)]
    held = [*named.values(), *cells, owner, *_held(owner), *(inner for cell in cells for inner in _held(cell))]
    return [each for each in held if isinstance(each, keras.Model)]


def _names(code: CodeType) -> list[str]:
    """The names that a function reads, and the functions inside it."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return [*code.co_names, *inner]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading it is the question
    except ValueError:
        return False
    return True


def _held(thing: Any) -> list[Any]:
    """What an object of the user's own has as attributes: a class that holds its models and its loop, say."""
    whole = thing is None or isinstance(thing, keras.Model | type)
    return [] if whole else list(getattr(thing, "__dict__", {}).values())
