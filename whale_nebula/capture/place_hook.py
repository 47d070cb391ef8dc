"""While a step is traced, calling a layer that `nb.place` knows enters its stage. Keras is then left as it was."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from whale_nebula.capture.place_trace import Places
from whale_nebula.capture.placed import placed_models
from whale_nebula.capture.tracing import current
from whale_nebula.tf import private as tf_private

_LOCK = threading.Lock()
_LOCAL = threading.local()
_open = 0
_call = tf_private.KerasLayer.__call__


@functools.wraps(_call)  # AutoGraph goes by its module: it leaves Keras's own functions as they are
def _called(layer: Any, *args: Any, **kwargs: Any) -> Any:
    trace, places = current(), getattr(_LOCAL, "places", None)
    if trace is None or trace.graph is None or trace.busy or places is None or tf_private.in_symbolic_scope():
        return _call(layer, *args, **kwargs)  # in a symbolic scope Keras builds the model, in a graph of its own
    with places.around(trace, layer):
        return _call(layer, *args, **kwargs)


@contextlib.contextmanager
def placing() -> Iterator[None]:
    """Hook the calls of layers while a step is traced, if a model is placed; taken off when the last trace ends."""
    if not any(True for _ in placed_models()):
        yield
        return
    before, places = getattr(_LOCAL, "places", None), Places()
    _LOCAL.places = places
    try:
        with _hooked():
            yield
        places.check()
    finally:
        _LOCAL.places = before


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    global _open
    with _LOCK:
        _open += 1
        tf_private.KerasLayer.__call__ = _called
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            if _open == 0:
                tf_private.KerasLayer.__call__ = _call
