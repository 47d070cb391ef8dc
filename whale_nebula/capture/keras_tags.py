"""While a scope is open, what Keras builds remembers it: nodes of functional models, layers added to a Sequential.

A functional model is built once and run later, so its scopes must lie on its *nodes* (a shared layer may sit in two
stages). `Sequential.add` rebuilds every earlier node, so there a layer keeps the scope in which it was added.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from whale_nebula import scopes
from whale_nebula.capture import keras_copies, keras_uncut
from whale_nebula.capture.keras_frames import Frames, built_under_scopes, tag
from whale_nebula.capture.placed import placements_in
from whale_nebula.capture.tracing import current, uncut_on_purpose
from whale_nebula.scopes import Frame
from whale_nebula.tf import private as tf_private

_LOCK = threading.Lock()
_LOCAL = threading.local()
_entered: weakref.WeakSet[Any] = weakref.WeakSet()
_open = 0
_node_init = tf_private.KerasNode.__init__
_add = tf_private.KerasSequential.add


class ScopeMet(BaseException):
    """A scope was met where none was expected. No error: it stops a trace, past everything that handles errors."""


def _frames() -> Frames:
    """The scopes that what is built now stands in; none while a step is traced."""
    return scopes.open_frames() if current() is None else ()


def _tag(target: Any, operation: Any, frames: Frames) -> None:
    tag(target, frames)
    keras_copies.watch(operation)
    for frame in frames:
        frame.touched = True


def _tagging_init(node: Any, *args: Any, **kwargs: Any) -> None:
    _node_init(node, *args, **kwargs)
    if frames := _frames():
        _tag(node, node.operation, frames)
        keras_copies.watch_node(node)
        keras_uncut.watch_node(node, frames)


def _tagging_add(model: Any, layer: Any, rebuild: bool = True) -> None:
    frames = _frames()
    if frames and not hasattr(layer, "_keras_history"):
        _tag(layer, layer, frames)
        keras_uncut.watch_sequential(model)
    _add(model, layer, rebuild=rebuild)


@contextlib.contextmanager
def none_expected() -> Iterator[None]:
    """Run something that should enter no scope: the first one that it enters raises `ScopeMet`."""
    before = getattr(_LOCAL, "none_expected", False)
    _LOCAL.none_expected = True
    try:
        yield
    finally:
        _LOCAL.none_expected = before


def enters_scopes(model: Any) -> None:
    """Remember that this model, or what it does in a step, enters scopes."""
    _entered.add(model)


def _check_expected() -> None:
    if getattr(_LOCAL, "none_expected", False) and not uncut_on_purpose():
        raise ScopeMet


class _Tagger:
    """Watches scopes: hooks Keras's construction while at least one is open."""

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        global _open
        layer = tf_private.entry_layer()
        if layer is not None and current() is None:
            enters_scopes(layer)
        if current() is None:
            _check_expected()
        with _LOCK:
            _open += 1
            tf_private.KerasNode.__init__ = _tagging_init
            tf_private.KerasSequential.add = _tagging_add
        try:
            yield
        finally:
            with _LOCK:
                _open -= 1
                if _open == 0:
                    tf_private.KerasNode.__init__ = _node_init
                    tf_private.KerasSequential.add = _add


def bears_scopes(model: Any) -> bool:
    """Whether a model was built under scopes, enters some when it is called, or is placed."""
    parts = tf_private.layers_of(model)
    return bool(placements_in(parts)) or any(part in _entered for part in parts) or built_under_scopes(model)


def install() -> list[scopes.Watcher]:
    """Watch scopes, once; gives the watcher if it was not there before."""
    if any(isinstance(watcher, _Tagger) for watcher in scopes.watchers):
        return []
    scopes.add_watcher(_Tagger())
    return scopes.watchers[-1:]
