"""Scopes of Keras models: recorded on nodes and layers while these are built, re-entered when a call is traced.

A functional model is built once and run later, so its scopes are attached to its *nodes* (a shared layer may be in two
stages). `Sequential.add` rebuilds every earlier node, so there each layer keeps the scope in which it was added. A
scope that is already open (entered in a `call`, or around the call of the model) takes precedence.

`clone_model`, `save` and `copy.deepcopy` copy models from configs, which contain no calls, so a copy has no scopes, and
a warning is issued. `get_config` of each layer with scopes is watched, and the copying function is found on the stack.
A model that is later loaded or created from a config is recognised only by its names: the warning is issued when it is
first trained.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from whale_nebula.capture.layer_placement import list_placements
from whale_nebula.capture.mirror import BUILT
from whale_nebula.capture.tracing import current_graph_trace, current_trace, is_uncut_on_purpose
from whale_nebula.scopes.compress_options import find_learned_rank
from whale_nebula.scopes.frames import Frame, compress_of, current_stack, open_frames, reenter, stage_of
from whale_nebula.scopes.hints import find_code_kind, warn_eager
from whale_nebula.scopes.scope import resolve_stack
from whale_nebula.site import script_site, warn_at, warn_once
from whale_nebula.tf import private as tf_private

Frames = tuple[Frame, ...]

_TAG, _LINE = "_nebula_frames", "_nebula_line"


def frames_of(tagged: Any) -> Frames:
    """The scopes in which a node (or its original, if it is a copy) or a Sequential's layer was created."""
    found: Frames | None = getattr(tagged, _TAG, None)
    if found is None and isinstance(tagged, tf_private.KerasNode):
        original = tf_private.find_original(tagged)
        found = None if original is None else frames_of(original)
    return found or ()


def attach_frames(target: Any, frames: Frames) -> None:
    """Attach scopes to a node or a Sequential's layer."""
    object.__setattr__(target, _TAG, frames)
    object.__setattr__(target, _LINE, str(script_site()))


def find_built_line(tagged: Any) -> str:
    """The user's line that created a node or added a Sequential's layer; empty outside scopes."""
    found: str = getattr(tagged, _LINE, "")
    return found


def has_built_scopes(model: Any) -> bool:
    """Whether a model, or one inside it, was built under scopes."""
    return any(frames_of(each) for part in tf_private.list_layers(model) for each in (part, *list_nodes(part)))


def list_stages(model: Any) -> list[Frame]:
    """The stages in which a model, or a functional one inside it, was built; for a Sequential, those of its layers."""
    found: list[Frame] = []
    for part in tf_private.list_layers(model):
        nodes = [] if isinstance(part, tf_private.KerasSequential) else list_nodes(part)
        stages = (stage_of(frames_of(each)) for each in (part, *nodes))
        found.extend(frame for frame in stages if frame is not None)
    return found


def list_nodes(layer: Any) -> list[Any]:
    """The nodes of a functional model, or of the one inside a Sequential; none of another layer."""
    return [node for level in tf_private.list_nodes_by_depth(layer).values() for node in level]


_WHY = "scopes apply to the calls of layers, and are not part of the config from which Keras copies a model"
_BUILD = "build it with the same code, inside the scopes"
_PLACE = 'or nb.place(model, {"layer/.*": "cluster", ...})'


_REBUILD = f"{_BUILD}, {_PLACE}"
_COPYING_FUNCTIONS = {
    "clone_model": ("the clone of model {!r} has no scopes", _REBUILD),
    "__reduce__": ("the copy of model {!r} has no scopes", _REBUILD),
    "save_model": (
        "model {!r} is saved without its scopes",
        f"to train it again with a plan, {_BUILD}, and load_weights(file), {_PLACE} after load_model(file)",
    ),
}
"""The Keras functions that copy a model, with the texts of the warning and its fix."""


class _Fingerprint(NamedTuple):
    """The features that a model shares with its copies."""

    model: str
    operations: tuple[tuple[str, str], ...]


_scoped: set[_Fingerprint] = set()
_cloned: set[_Fingerprint] = set()
"""Fingerprints of clones that caused a warning and have not run yet: they cause no second warning when they do."""
_reported: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models with a warning that they run uncut, by identity: a different model with the same layers causes another
one.
"""


def watch_config(operation: Any) -> None:
    """Call `warn_of_copy` when the config of this layer or operation, which was called under scopes, is read."""
    if not hasattr(operation.get_config, "nebula_watched"):
        tf_private.call_on_config(operation, warn_of_copy)
        operation.get_config.nebula_watched = True


def warn_if_copy(model: Any) -> None:
    """Warn of a model without scopes, about to run, with the same layers as one with scopes."""
    parts = _parts(model) if _scoped else []
    clones = [part for part in parts if _fingerprint(part) in _cloned]
    _reported.update(clones)
    _cloned.difference_update(map(_fingerprint, clones))
    copy = next((part for part in parts if _fingerprint(part) in _scoped), None)
    if copy is not None and copy not in _reported:
        _reported.add(copy)
        warn_at(
            script_site(),
            f"model {copy.name!r} runs uncut",
            why=f"it has no scopes, but the saved model with this name and these layers had some: {_WHY}",
            mend=f"{_BUILD}, and load_weights(file), {_PLACE};\n"
            f"a model that is to run uncut needs a different name: keras.Model(..., name={copy.name + '_uncut'!r})",
        )


def warn_of_copy() -> None:
    """Warn if a running Keras call copies or saves a model with scopes; called when a config of it is read."""
    calls = [call for call in tf_private.list_keras_calls() if isinstance(call.first_argument, keras.Model)]
    found = next((call for call in reversed(calls) if call.name in _COPYING_FUNCTIONS), None)
    saved = found is not None and found.name == "save_model"
    if found is None or saved:
        _scoped.update(
            _fingerprint(call.first_argument)
            for call in calls
            if call.name == "get_config" and _is_model(call.first_argument)
        )
    # a copy created inside a stage gets its own scopes; `nb.cluster` alone adds none
    if found is None or not has_built_scopes(found.first_argument) or (not saved and stage_of(open_frames())):
        return
    if not saved:
        _cloned.update(map(_fingerprint, _parts(found.first_argument)))
    what, mend = _COPYING_FUNCTIONS[found.name]
    site, why = script_site(found.frame), f"{_WHY}; this is reported once for this line"
    warn_once(site, what.format(found.first_argument.name), why=why, mend=mend, key=found.name)


def _parts(model: Any) -> list[Any]:
    """A model and its nested models."""
    return [part for part in tf_private.list_layers(model) if _is_model(part)]


def _is_model(value: Any) -> bool:
    return isinstance(value, (tf_private.KerasFunction, tf_private.KerasSequential))


def _fingerprint(model: Any) -> _Fingerprint:
    """The names of a model's operations without inputs; for a Sequential those of its layers."""
    found = model.operations if isinstance(model, tf_private.KerasFunction) else model.layers
    kept = (part for part in found if not isinstance(part, tf_private.KerasInput))
    return _Fingerprint(model.name, tuple(sorted((type(part).__name__, part.name) for part in kept)))


class _Local(threading.local):
    forbid_scopes = False
    sequential: Any = None
    """The functional model inside the running Sequential: its layers have the scopes, not its nodes."""
    tagged: Any = None
    """The node, or the layer of a Sequential, that runs next."""


_LOCAL = _Local()
_entered: weakref.WeakSet[Any] = weakref.WeakSet()
_node_init = tf_private.KerasNode.__init__
_add = tf_private.KerasSequential.add
_run = tf_private.KerasFunction._run_through_graph
_operation_for = tf_private.KerasFunction._get_operation_for_node
_call = tf_private.KerasSequential.call


class ScopeEntered(BaseException):
    """Raised by a scope where none was expected. It is not an Exception: it stops a trace past all error handlers."""


# ---------------------------------------------------------------------- while models are built
def _tag_and_watch(target: Any, operation: Any, frames: Frames) -> None:
    attach_frames(target, frames)
    watch_config(operation)
    for frame in frames:
        frame.touched = True


def _frames() -> Frames:
    """The scopes around the layer that is being built; none while a step is traced."""
    return open_frames() if current_trace() is None else ()


def init_node(node: Any, *args: Any, **kwargs: Any) -> None:
    """Replacement of `Node.__init__` that tags the node with the open scopes."""
    _node_init(node, *args, **kwargs)
    if frames := _frames():
        _tag_and_watch(node, node.operation, frames)
        _watch_node(node, frames, tagged=True)


def add_layer(model: Any, layer: Any, rebuild: bool = True) -> None:
    """Replacement of `Sequential.add` that tags the layer with the open scopes."""
    frames = _frames()
    if frames and not hasattr(layer, "_keras_history"):
        _tag_and_watch(layer, layer, frames)
        if not hasattr(model.build, "nebula_watched"):  # build creates the nodes later, and again for each added layer
            tf_private.call_on_build(model, functools.partial(_watch_nodes, model))
            model.build.nebula_watched = True
    _add(model, layer, rebuild=rebuild)


def _watch_nodes(model: Any) -> None:
    for node in list_nodes(model):
        if not frames_of(node):
            _watch_node(node, (), tagged=False)


def _watch_node(node: Any, frames: Frames, *, tagged: bool) -> None:
    """Watch runs of this node; it, or its layer in a Sequential, was created under these scopes."""
    frames = frames_of(node.operation) or frames
    stage, around = stage_of(frames), compress_of(frames)
    has_learned_basis = around is not None and find_learned_rank(around) is not None

    def note_arguments(arguments: Any) -> None:
        leaves = tf.nest.flatten(arguments)
        if tagged and any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
            warn_of_copy()  # it runs to create a clone, which may share layers without their config
        if stage is not None and any(isinstance(leaf, tf.Tensor) for leaf in leaves):
            _warn_if_eager(stage, has_learned_basis)

    if tagged or stage is not None:
        tf_private.call_on_run(node, note_arguments)


def _warn_if_eager(stage: Frame, has_learned_basis: bool) -> None:
    if current_trace() is not None or is_uncut_on_purpose():
        return
    code = find_code_kind()
    if code is not None and (not tf.executing_eagerly() or tf_private.is_tape_recording() or has_learned_basis):
        place = script_site()
        consequence = f"so the scopes around the construction of the model, at {stage.site}, have no effect"
        consequence += ", and no tensor is projected on its learned basis" * has_learned_basis
        warn_eager(stage, code, consequence, where=place, program=place)


# ---------------------------------------------------------------------- models with scopes
@contextlib.contextmanager
def forbid_scopes() -> Iterator[None]:
    """Context of code that should enter no scope: the first one entered raises `ScopeEntered`."""
    before = _LOCAL.forbid_scopes
    _LOCAL.forbid_scopes = True
    try:
        yield
    finally:
        _LOCAL.forbid_scopes = before


def mark_scoped(model: Any) -> None:
    """Mark a model, or its step, as entering scopes."""
    _entered.add(model)


def record_entry() -> None:
    """Record that a scope is entered: outside a trace, the running layer is marked as entering scopes. Raises
    `ScopeEntered` inside `forbid_scopes`.
    """
    if current_trace() is not None:
        return
    layer = tf_private.find_entry_layer()
    if layer is not None:
        mark_scoped(layer)
    if _LOCAL.forbid_scopes and not is_uncut_on_purpose():
        raise ScopeEntered


def has_scopes(model: Any) -> bool:
    """Whether a model was built under scopes, enters some when it is called, or is placed."""
    parts = tf_private.list_layers(model)
    return bool(list_placements(parts)) or any(part in _entered for part in parts) or has_built_scopes(model)


# ---------------------------------------------------------------------- while a step is traced
def note_next_node(function: Any, node: Any) -> Any:
    """Replacement of `Function._get_operation_for_node`, which Keras calls for each node before it runs: note the node
    (or the layer of a Sequential) whose scopes `run_graph` opens.
    """
    _LOCAL.tagged = node.operation if _LOCAL.sequential is function else node
    return _operation_for(function, node)


def run_graph(function: Any, inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
    """Replacement of `Function._run_through_graph`: each node runs in the scopes that it was built in."""
    trace = current_trace()
    if trace is None or call_fn is not None:
        return _run(function, inputs, operation_fn, call_fn)
    if _LOCAL.sequential is not function:  # record all stages of a model before the first is entered
        trace.entered_scopes.add_model(list_stages(function))

    def wrap_operation(operation: Any) -> Any:
        frames, line = frames_of(_LOCAL.tagged), find_built_line(_LOCAL.tagged)
        called = operation_fn(operation)

        def run_in_scopes(*args: Any, **kwargs: Any) -> Any:
            trace = current_graph_trace()
            opened, stage = stage_of(open_frames()), stage_of(frames)
            if stage is not None and opened in current_stack().around_step:
                resolve_stack("stage", stage.site, current_stack())
            stamps = tf_private.stamp_ops(trace.graph, {BUILT: line}) if trace else contextlib.nullcontext()
            with stamps, reenter(frames) if opened is None else contextlib.nullcontext():
                return called(*args, **kwargs)

        return run_in_scopes if frames else called

    return _run(function, inputs, wrap_operation, None)


def call_sequential(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `Sequential.call`, where layers have the scopes instead of nodes."""
    trace = current_trace()
    if trace is not None:
        trace.entered_scopes.add_model(list_stages(model))
    before = _LOCAL.sequential
    _LOCAL.sequential = model._functional
    try:
        return _call(model, *args, **kwargs)
    finally:
        _LOCAL.sequential = before
