"""The hook in Keras's `make_{train,test,predict}_function`, which routes models with scopes to this runtime.

It must decide early, because a subclassed model that starts with `fit` enters scopes inside Keras's own trace, too late
to divide anything. A model without scopes is passed to Keras unchanged. `tf.keras_import` has the wrapper.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from whale_nebula.capture import keras_scopes
from whale_nebula.capture.arguments import DeclaredInputs
from whale_nebula.capture.keras_scopes import has_scopes
from whale_nebula.capture.layer_placement import count_changes, list_placements
from whale_nebula.capture.patches import install as install
from whale_nebula.runtime.run import current_run, find_open_run
from whale_nebula.scopes.auto import get_current_limits
from whale_nebula.scopes.frames import open_frames, stage_of
from whale_nebula.scopes.observer import observer, record_unscoped
from whale_nebula.scopes.placement import Placement
from whale_nebula.site import script_site, short_traceback, warn_once
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.iterators import disable_array_tuning

Original = Callable[..., Any]
_CUTTING = ("cluster", "replica", "pipeline")


class _Conditions(NamedTuple):
    """The conditions under which a model's functions were created: `count_changes()`, its placement, and whether scopes
    around them count.
    """

    changes: int = 0
    placements: tuple[Placement, ...] = ()
    has_scopes_around: bool = False


_conditions: weakref.WeakKeyDictionary[Any, _Conditions] = weakref.WeakKeyDictionary()


@short_traceback
def make_function(kind: str, original: Original, model: Any, force: bool) -> Any:
    """Replacement of `make_train_function` and similar methods of a model."""
    install()
    watcher = observer()
    if watcher is not None and kind != "predict":
        watcher.begin_training()
    inside = _is_inside_scopes()
    _drop_outdated_functions(model, inside)
    attribute = f"{kind}_function"
    if getattr(model, attribute) is None or force:
        _set_function(kind, original, model, force, inside)
    if inside or has_scopes(model):
        _prepare_loop(model)
    else:
        _synchronize_weights(model)
    if kind == "train":
        _watch_fit(model)
    return getattr(model, attribute)


def _set_function(kind: str, original: Original, model: Any, force: bool, inside: bool) -> None:
    if inside or has_scopes(model):
        setattr(model, f"{kind}_function", _make_step_function(model, kind))
        return
    keras_scopes.warn_if_copy(model)
    if _may_have_scopes(model, kind):
        setattr(model, f"{kind}_function", _Probe(model, kind, original))
    else:
        record_unscoped(model.name, kind)
        original(model, force)
        _prepare_plain_model(model, kind)


def _prepare_loop(model: Any) -> None:
    """Prepare Keras's loop over a model with scopes: arrays are read without automatic tuning, and in several processes
    its callbacks write files together.
    """
    disable_array_tuning(model)
    if not current_run().alone:
        from whale_nebula.runtime.variables.reads import make_callbacks_collective

        make_callbacks_collective()


def _synchronize_weights(model: Any) -> None:
    """Under local SGD, end the round if a model without scopes has weights that all clusters train."""
    run = find_open_run()
    if run is not None and run.rounds is not None and run.rounds.trains_any(model.weights):
        run.settle()


def _watch_fit(model: Any) -> None:
    """In a run with checkpoints, let a `fit` of the model note its position, and resume where the run stopped."""
    run = find_open_run()
    if run is not None and run.checkpoints is not None:
        from whale_nebula.runtime.checkpoint.fit_position import watch_fit

        watch_fit(run.checkpoints, model)


def _prepare_plain_model(model: Any, kind: str) -> None:
    """Prepare a model without scopes, which may share layers with one that has scopes: in several processes, everything
    that it reads must be in this process. If checkpoints are written by a single process, it is saved like others.
    """
    run = find_open_run()
    if run is None:
        return
    count = len(run.workers)
    if count > 1:
        _require_variables(model, kind)
        if kind == "train" and run.checkpoints is not None:
            what = f"model {model.name!r} has no scopes, and is not saved in checkpoints"
            why = f"each of the {count} processes trains its own, independent copy of it"
            mend = "call nb.save(path, model) in one of them; or put scopes around its layers"
            warn_once(script_site(), what, why=why, mend=mend, where="", key=model.name)
    elif run.checkpoints is not None:
        from whale_nebula.runtime.checkpoint.plain_step import PlainStep, restore_trained

        if kind == "train":
            model.train_function = PlainStep(run.checkpoints, model)
        else:
            restore_trained(run.checkpoints, model, kind)


def _require_variables(model: Any, kind: str) -> None:
    from whale_nebula.runtime.variables.reads import forget_results
    from whale_nebula.runtime.variables.remote import require_local

    forget_results(model)
    function = getattr(model, f"{kind}_function")

    @functools.wraps(function)
    def checked(iterator: Any) -> Any:
        require_local(model.variables)
        return function(iterator)

    setattr(model, f"{kind}_function", checked)


def _is_inside_scopes() -> bool:
    """Whether scopes are open that divide a whole step, or `nb.auto_parallel` is active."""
    frames = open_frames()
    if get_current_limits() is not None:
        return True
    return stage_of(frames) is None and any(frame.kind in _CUTTING for frame in frames)


def _drop_outdated_functions(model: Any, inside: bool) -> None:
    """Drop a model's functions if `nb.place` was called for a part of it since then, or if the scopes around a model
    without scopes differ.
    """
    before = _conditions.get(model, _Conditions())
    if (before.changes, before.has_scopes_around) == (count_changes(), inside):
        return
    found = _conditions[model] = _Conditions(count_changes(), list_placements(tf_private.list_layers(model)), inside)
    is_outdated = found.placements != before.placements or (
        inside != before.has_scopes_around and not has_scopes(model)
    )
    for kind in ("train", "test", "predict") if is_outdated else ():
        setattr(model, f"{kind}_function", None)


def _may_have_scopes(model: Any, kind: str) -> bool:
    """Whether a model may enter scopes later: a subclassed model when it is called, or its own step when that runs.

    A functional model does not call a user layer that computes its own output shape, and an RNN does not call its cell.
    """
    if not isinstance(model, tf_private.KerasFunction) or _overrides(model, f"{kind}_step"):
        return True
    return not all(type(layer).__module__.startswith("keras.") for layer in tf_private.list_layers(model))


def _overrides(model: Any, name: str) -> bool:
    return getattr(type(model), name) is not getattr(keras.Model, name)


def _make_step_function(model: Any, kind: str) -> Callable[[Any], Any]:
    from whale_nebula.runtime.keras import make_step_function

    return make_step_function(model, kind)


class _Probe:
    """Replacement of a subclassed model's function until its first batch shows whether it has scopes."""

    def __init__(self, model: Any, kind: str, original: Original) -> None:
        self._model, self._kind, self._original = model, kind, original
        self._function: Callable[[Any], Any] | None = None

    def __call__(self, iterator: Any) -> Any:
        if self._function is not None:
            return self._function(iterator)
        get_iterator, batch = _peek(iterator)
        if _overrides(self._model, "call") and not getattr(self._model, "run_eagerly", False):
            _call_symbolically(self._model, batch)
        return self._capture_step(get_iterator) if has_scopes(self._model) else self._try_plainly(get_iterator)

    def _capture_step(self, get_iterator: Callable[[], Any]) -> Any:
        _prepare_loop(self._model)
        return self._set_final_function(_make_step_function(self._model, self._kind))(get_iterator())

    def _try_plainly(self, get_iterator: Callable[[], Any]) -> Any:
        """Run Keras's function; if a scope is entered in it (as in a `train_step`), stop it and capture the step."""
        setattr(self._model, f"{self._kind}_function", None)
        self._original(self._model, True)
        _prepare_plain_model(self._model, self._kind)
        function = self._set_final_function(getattr(self._model, f"{self._kind}_function"))
        try:
            with keras_scopes.forbid_scopes():
                results = function(get_iterator())
        except keras_scopes.ScopeEntered:
            keras_scopes.mark_scoped(self._model)
            return self._capture_step(get_iterator)
        record_unscoped(self._model.name, self._kind)
        return results

    def _set_final_function(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        self._function = function
        setattr(self._model, f"{self._kind}_function", function)
        return function


def _peek(iterator: Any) -> tuple[Callable[[], Any], Any]:
    """A function that returns an iterator which still yields the next batch, and that batch, or its specs."""
    if isinstance(iterator, tf.data.Iterator):
        return (lambda: iterator), iterator.element_spec
    if isinstance(iterator, list):
        return (lambda: iterator), iterator[0]
    first = next(iter(iterator))
    return (lambda: itertools.chain([first], iterator)), first


def _call_symbolically(model: Any, batch: Any) -> None:
    """Call a model without computing anything, so that scopes in its `call` are entered; its own errors are raised
    later by `fit`.

    Layers that are built have the same names as in Keras's own trace.
    """
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    form = _make_keras_tensors(x)
    try:
        with tf.name_scope(model.name):
            tf_private.compute_output_spec(model, form, training=False)
    except Exception:
        return


def _make_keras_tensors(x: Any) -> Any:
    """Symbolic tensors of Keras in the structure of a model's inputs; one that is None gets its configured shape."""
    x = tf.nest.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") else None, x)
    if any(leaf is None for leaf in tf.nest.flatten(x)):
        forms = DeclaredInputs(current_run().config.inputs, is_single_process=False)
        x = forms.expand_argument("x", x)
        paths = ["/".join(["x", *map(str, path)]) for path, _ in tf_private.list_leaf_paths(x)]
        leaves = zip(paths, tf.nest.flatten(x), strict=True)
        found = [forms.make_placeholder(path) if leaf is None else leaf for path, leaf in leaves]
        x = tf.nest.pack_sequence_as(x, found)

    def form(leaf: Any) -> Any:
        shape = (None, *tuple(leaf.shape)[1:]) if leaf is not None and len(leaf.shape) else ()
        return None if leaf is None else keras.KerasTensor(shape, leaf.dtype)

    return tf.nest.map_structure(form, x)
