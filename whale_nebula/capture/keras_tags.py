"""Record the open scopes on the nodes of functional models and on the layers of a Sequential as Keras builds them.

A functional model is built once and run later, so its scopes must lie on its *nodes* (a shared layer may sit in two
stages). `Sequential.add` rebuilds every earlier node, so there a layer keeps the scope in which it was added.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture import keras_copies
from whale_nebula.capture.keras_copies import Frames, built_under_scopes, frames_of, tag
from whale_nebula.capture.placed import placements_in
from whale_nebula.capture.projection import learned_rank
from whale_nebula.capture.tracing import current, uncut_on_purpose
from whale_nebula.scopes import Frame
from whale_nebula.scopes.hints import running
from whale_nebula.scopes.hints import warn_eager as tell
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


def watch_node(node: Any, frames: Frames) -> None:
    """Hear when this node runs: it was made under these scopes, or its layer was, where that is in a Sequential."""
    frames = frames_of(node.operation) or frames
    stage, around = scopes.stage_of(frames), scopes.compress_of(frames)
    if stage is not None:
        projects = around is not None and learned_rank(around) is not None
        tf_private.on_run(node, functools.partial(_ran, stage, projects))


def watch_sequential(model: Any) -> None:
    """Hear when the layers of a Sequential run; it makes their nodes later, and anew with each layer."""
    if not hasattr(model.build, "nebula_heard"):
        tf_private.on_build(model, functools.partial(_mark_built, model))
        model.build.nebula_heard = True


def _mark_built(model: Any) -> None:
    for level in tf_private.nodes_by_depth(model).values():
        for node in level:
            if not frames_of(node):
                watch_node(node, frames_of(node.operation))


def _ran(stage: Frame, projects: bool, arguments: Any) -> None:
    if current() is not None or uncut_on_purpose():
        return
    code = running()
    if code is None or (tf.executing_eagerly() and not tf_private.tape_records() and not projects):
        return
    if any(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(arguments)):
        place = script_site()
        then = f"so the scopes that the model was built in, at {stage.site}, catch nothing"
        then += ", and nothing is projected on its learned basis" * projects
        tell(stage, code, then, where=place, program=place)


_LOCAL = threading.local()
_entered: weakref.WeakSet[Any] = weakref.WeakSet()
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


def init_node(node: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `Node.__init__`: the node is tagged with the open scopes."""
    _node_init(node, *args, **kwargs)
    if frames := _frames():
        _tag(node, node.operation, frames)
        keras_copies.watch_node(node)
        watch_node(node, frames)


def add_layer(model: Any, layer: Any, rebuild: bool = True) -> None:
    """Stands in for `Sequential.add`: the layer is tagged with the open scopes."""
    frames = _frames()
    if frames and not hasattr(layer, "_keras_history"):
        _tag(layer, layer, frames)
        watch_sequential(model)
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


def note_entry() -> None:
    """A scope is entered: outside of a trace the layer whose call does it bears scopes from now on."""
    if current() is not None:
        return
    layer = tf_private.entry_layer()
    if layer is not None:
        enters_scopes(layer)
    _check_expected()


def bears_scopes(model: Any) -> bool:
    """Whether a model was built under scopes, enters some when it is called, or is placed."""
    parts = tf_private.layers_of(model)
    return bool(placements_in(parts)) or any(part in _entered for part in parts) or built_under_scopes(model)
