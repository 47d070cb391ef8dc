"""While a scope is open, what Keras builds remembers it: nodes of functional models, layers added to a Sequential.

A functional model is built once and run later, so its scopes must lie on its *nodes* (a shared layer may sit in two
stages). `Sequential.add` rebuilds every earlier node, so there a layer keeps the scope in which it was added.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from whale_nebula import scopes, tf_private
from whale_nebula.capture.tracing import current
from whale_nebula.scopes import Frame

Frames = tuple[Frame, ...]

_TAG = "_nebula_frames"
_entered: weakref.WeakSet[Any] = weakref.WeakSet()
_open = 0
_node_init = tf_private.KerasNode.__init__
_add = tf_private.KerasSequential.add


def frames_of(tagged: Any) -> Frames:
    """The scopes that a node or a Sequential's layer was made in."""
    found: Frames = getattr(tagged, _TAG, ())
    return found


def _tag(target: Any) -> None:
    frames = scopes.open_frames()
    if frames and current() is None:
        object.__setattr__(target, _TAG, frames)
        for frame in frames:
            frame.touched = True


def _tagging_init(node: Any, *args: Any, **kwargs: Any) -> None:
    _node_init(node, *args, **kwargs)
    _tag(node)


def _tagging_add(model: Any, layer: Any, rebuild: bool = True) -> None:
    if not hasattr(layer, "_keras_history"):
        _tag(layer)
    _add(model, layer, rebuild=rebuild)


class _Tagger:
    """Watches scopes: hooks Keras's construction while at least one is open."""

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        global _open
        layer = tf_private.entry_layer()
        if layer is not None:
            _entered.add(layer)
            frame.touched = True
        _open += 1
        tf_private.KerasNode.__init__ = _tagging_init
        tf_private.KerasSequential.add = _tagging_add
        try:
            yield
        finally:
            _open -= 1
            if _open == 0:
                tf_private.KerasNode.__init__ = _node_init
                tf_private.KerasSequential.add = _add


def bears_scopes(model: Any) -> bool:
    """Whether a model was built under scopes, or enters some when it is called."""
    return any(_bears(part) for part in tf_private.layers_of(model))


def _bears(layer: Any) -> bool:
    if layer in _entered or frames_of(layer):
        return True
    nodes = (node for level in tf_private.nodes_by_depth(layer).values() for node in level)
    return any(frames_of(node) for node in nodes)


def install() -> list[scopes.Watcher]:
    """Watch scopes, once; gives the watcher if it was not there before."""
    if any(isinstance(watcher, _Tagger) for watcher in scopes.watchers):
        return []
    scopes.add_watcher(_Tagger())
    return scopes.watchers[-1:]
