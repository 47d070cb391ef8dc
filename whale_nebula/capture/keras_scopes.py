"""Scopes of Keras models: recorded on nodes and layers while these are built, re-entered when a call is traced.

A functional model is built once and run later, so its scopes are attached to its *nodes* (a shared layer may be in two
stages). `Sequential.add` rebuilds every earlier node, so there each layer keeps the scope in which it was added. A
scope that is already open (entered in a `call`, or around the model's call) takes precedence.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.capture import keras_copies
from whale_nebula.capture.keras_copies import Frames, built_at, built_under_scopes, frames_of, nodes_of, stages_of, tag
from whale_nebula.capture.placed import placements_in
from whale_nebula.capture.projection import learned_rank
from whale_nebula.capture.source_lines import BUILT
from whale_nebula.capture.tracing import current, current_here, uncut_on_purpose
from whale_nebula.scopes.frames import Frame, compress_of, current_stack, open_frames, reenter, stage_of
from whale_nebula.scopes.hints import running, warn_eager
from whale_nebula.scopes.scope import settle
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


class _Local(threading.local):
    none_expected = False
    sequential: Any = None
    """The functional model inside the running Sequential: its layers have the scopes, not its nodes."""
    tagged: Any = None
    """The node, or layer, that runs next."""


_LOCAL = _Local()
_entered: weakref.WeakSet[Any] = weakref.WeakSet()
_node_init = tf_private.KerasNode.__init__
_add = tf_private.KerasSequential.add
_run = tf_private.KerasFunction._run_through_graph
_operation_for = tf_private.KerasFunction._get_operation_for_node
_call = tf_private.KerasSequential.call


class ScopeMet(BaseException):
    """Raised by a scope where none was expected. It is no Exception: it stops a trace past all error handlers."""


# ---------------------------------------------------------------------- while models are built
def _tag(target: Any, operation: Any, frames: Frames) -> None:
    tag(target, frames)
    keras_copies.watch(operation)
    for frame in frames:
        frame.touched = True


def _frames() -> Frames:
    """The scopes around the layer that is being built; none while a step is traced."""
    return open_frames() if current() is None else ()


def init_node(node: Any, *args: Any, **kwargs: Any) -> None:
    """Replacement of `Node.__init__` that tags the node with the open scopes."""
    _node_init(node, *args, **kwargs)
    if frames := _frames():
        _tag(node, node.operation, frames)
        _watch_node(node, frames, tagged=True)


def add_layer(model: Any, layer: Any, rebuild: bool = True) -> None:
    """Replacement of `Sequential.add` that tags the layer with the open scopes."""
    frames = _frames()
    if frames and not hasattr(layer, "_keras_history"):
        _tag(layer, layer, frames)
        if not hasattr(model.build, "nebula_heard"):  # build makes the nodes later, and again for each added layer
            tf_private.call_on_build(model, functools.partial(_watch_nodes, model))
            model.build.nebula_heard = True
    _add(model, layer, rebuild=rebuild)


def _watch_nodes(model: Any) -> None:
    for node in nodes_of(model):
        if not frames_of(node):
            _watch_node(node, (), tagged=False)


def _watch_node(node: Any, frames: Frames, *, tagged: bool) -> None:
    """Watch runs of this node, which, or whose layer in a Sequential, was made under these scopes."""
    frames = frames_of(node.operation) or frames
    stage, around = stage_of(frames), compress_of(frames)
    projects = around is not None and learned_rank(around) is not None

    def hear(arguments: Any) -> None:
        leaves = tf.nest.flatten(arguments)
        if tagged and any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
            keras_copies.find_copy_by_user()  # it runs to make a clone, which may share layers without their config
        if stage is not None and any(isinstance(leaf, tf.Tensor) for leaf in leaves):
            _warn_if_eager(stage, projects)

    if tagged or stage is not None:
        tf_private.call_on_run(node, hear)


def _warn_if_eager(stage: Frame, projects: bool) -> None:
    if current() is not None or uncut_on_purpose():
        return
    code = running()
    if code is not None and (not tf.executing_eagerly() or tf_private.tape_records() or projects):
        place = script_site()
        then = f"so the scopes that the model was built in, at {stage.site}, catch nothing"
        then += ", and nothing is projected on its learned basis" * projects
        warn_eager(stage, code, then, where=place, program=place)


# ---------------------------------------------------------------------- models with scopes
@contextlib.contextmanager
def none_expected() -> Iterator[None]:
    """Run code that should enter no scope: the first one entered raises `ScopeMet`."""
    before = _LOCAL.none_expected
    _LOCAL.none_expected = True
    try:
        yield
    finally:
        _LOCAL.none_expected = before


def enters_scopes(model: Any) -> None:
    """Mark a model, or its step, as entering scopes."""
    _entered.add(model)


def note_entry() -> None:
    """Record that a scope is entered: outside a trace, the running layer is marked as entering scopes."""
    if current() is not None:
        return
    layer = tf_private.entry_layer()
    if layer is not None:
        enters_scopes(layer)
    if _LOCAL.none_expected and not uncut_on_purpose():
        raise ScopeMet


def bears_scopes(model: Any) -> bool:
    """Whether a model was built under scopes, enters some when it is called, or is placed."""
    parts = tf_private.layers_of(model)
    return bool(placements_in(parts)) or any(part in _entered for part in parts) or built_under_scopes(model)


# ---------------------------------------------------------------------- while a step is traced
def find_operation(function: Any, node: Any) -> Any:
    """The operation of a node, wrapped in the node's scopes; Keras calls this for each node before its operation."""
    _LOCAL.tagged = node.operation if _LOCAL.sequential is function else node
    return _operation_for(function, node)


def run_graph(function: Any, inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
    """Replacement of `Function._run_through_graph`: each node runs in the scopes that it was built in."""
    trace = current()
    if trace is None or call_fn is not None:
        return _run(function, inputs, operation_fn, call_fn)
    if _LOCAL.sequential is not function:  # record all stages of a model before the first is entered
        trace.met.meet_model(stages_of(function))

    def wrap_operation(operation: Any) -> Any:
        frames, line = frames_of(_LOCAL.tagged), built_at(_LOCAL.tagged)
        called = operation_fn(operation)

        def run_in_scopes(*args: Any, **kwargs: Any) -> Any:
            trace = current_here()
            opened, stage = stage_of(open_frames()), stage_of(frames)
            if stage is not None and opened in current_stack().around_step:
                settle("stage", stage.site, current_stack())
            stamps = tf_private.stamp_ops(trace.graph, {BUILT: line}) if trace else contextlib.nullcontext()
            with stamps, reenter(frames) if opened is None else contextlib.nullcontext():
                return called(*args, **kwargs)

        return run_in_scopes if frames else called

    return _run(function, inputs, wrap_operation, None)


def call_sequential(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `Sequential.call`, where layers have the scopes instead of nodes."""
    trace = current()
    if trace is not None:
        trace.met.meet_model(stages_of(model))
    before = _LOCAL.sequential
    _LOCAL.sequential = model._functional
    try:
        return _call(model, *args, **kwargs)
    finally:
        _LOCAL.sequential = before
