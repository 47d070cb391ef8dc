"""Warn when a model that was built under scopes is copied: the copy has no scopes.

The scopes lie on the calls of layers. `clone_model`, `save` and `copy.deepcopy` make what they make from configs, which
hold no calls; so each layer that bears scopes tells when it gives its config. Who asked is read off the stack. What is
loaded or made from a config later is only known by its names: that is said when it is first trained, of each model.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes import Frame
from whale_nebula.site import Site, script_site
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.private import KerasCall

Frames = tuple[Frame, ...]

_TAG, _LINE = "_nebula_frames", "_nebula_line"


def frames_of(tagged: Any) -> Frames:
    """The scopes that a node or a Sequential's layer was made in."""
    found: Frames = getattr(tagged, _TAG, ())
    return found


def tag(target: Any, frames: Frames) -> None:
    """Let a node or a Sequential's layer remember its scopes."""
    object.__setattr__(target, _TAG, frames)
    object.__setattr__(target, _LINE, str(script_site()))


def built_at(tagged: Any) -> str:
    """The user's line that made a node, or added a Sequential's layer; empty outside of scopes."""
    found: str = getattr(tagged, _LINE, "")
    return found


def built_under_scopes(model: Any) -> bool:
    """Whether a model, or one inside it, was built under scopes."""
    return any(_made_in_scopes(part) for part in tf_private.layers_of(model))


def stages_of(model: Any) -> list[Frame]:
    """The stages that a model, or a functional one inside it, was built in."""
    tagged = (each for part in tf_private.layers_of(model) for each in (part, *_own_nodes(part)))
    found = (scopes.stage_of(frames_of(each)) for each in tagged)
    return [frame for frame in found if frame is not None]


def _own_nodes(layer: Any) -> list[Any]:
    """Those that bear its scopes: a Sequential's layers do so themselves."""
    return [] if isinstance(layer, tf_private.KerasSequential) else _nodes(layer)


def _made_in_scopes(layer: Any) -> bool:
    return bool(frames_of(layer)) or any(frames_of(node) for node in _nodes(layer))


def _nodes(layer: Any) -> list[Any]:
    return [node for level in tf_private.nodes_by_depth(layer).values() for node in level]


_LIE = "scopes lie on the calls of layers, and the configs that models are copied by hold none"
_BUILD = "build it by the same code, under the scopes"
_PLACE = 'or nb.place(model, {"layer/.*": "cluster", ...})'


class _Way(NamedTuple):
    """A way to copy: what is said of it, and what to do."""

    what: str
    mend: str


_WAYS = {
    "clone_model": _Way("the clone of model {!r} has no scopes", f"{_BUILD}, {_PLACE}"),
    "__reduce__": _Way("the copy of model {!r} has no scopes", f"{_BUILD}, {_PLACE}"),
    "save_model": _Way(
        "model {!r} is saved without its scopes",
        f"to train it again by a plan, {_BUILD}, and load_weights(file), {_PLACE} after load_model(file)",
    ),
}


class _Print(NamedTuple):
    """What a model and its copies have in common."""

    model: str
    operations: tuple[tuple[str, str], ...]


_given: set[_Print] = set()
_cloned: set[_Print] = set()
"""What a clone was told of that has not run yet: when it does, all is said."""
_said: set[tuple[str, Site]] = set()
_told: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models of which it was said that they run uncut: another of the same layers is another model."""


def watch(operation: Any) -> None:
    """Hear when this layer or operation, which was called under scopes, gives its config."""
    if not hasattr(operation.get_config, "nebula_heard"):
        tf_private.on_config(operation, _require_copy_by_user)
        operation.get_config.nebula_heard = True


def watch_node(node: Any) -> None:
    """Hear when this node, which was made under scopes, is run for a clone: layers may be shared, unasked."""
    tf_private.on_run(node, _ran)


def _ran(arguments: Any) -> None:
    if any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(arguments)):
        _require_copy_by_user()


def tell_if_copy(model: Any) -> None:
    """Say that a model without scopes, about to run, has the layers of one that had some."""
    parts = _parts(model) if _given else []
    clones = [part for part in parts if _print(part) in _cloned]
    _told.update(clones)
    _cloned.difference_update(map(_print, clones))
    copy = next((part for part in parts if _print(part) in _given), None)
    if copy is not None and copy not in _told:
        _told.add(copy)
        _warn(
            f"model {copy.name!r} runs uncut",
            why=f"it has no scopes, and a model of this name and these layers that was saved had some: {_LIE}",
            mend=f"{_BUILD}, and load_weights(file), {_PLACE};\n"
            f"one that is meant to run uncut has a name of its own: keras.Model(..., name={copy.name + '_uncut'!r})",
            site=script_site(),
        )


def _require_copy_by_user() -> None:
    """The outermost call of Keras that copies a whole model is what the user wrote."""
    calls = [call for call in tf_private.keras_calls() if isinstance(call.given, keras.Model)]
    found = next((call for call in reversed(calls) if call.name in _WAYS), None)
    if found is None or found.name == "save_model":
        _given.update(_print(call.given) for call in calls if call.name == "get_config" and _model(call.given))
    if found is not None and built_under_scopes(found.given) and not _gets_others(found):
        _tell(found)


def _gets_others(call: KerasCall) -> bool:
    """Whether what a call makes stands in a stage of its own; `nb.cluster` alone gives it none."""
    return call.name != "save_model" and scopes.stage_of(scopes.open_frames()) is not None


def _tell(call: KerasCall) -> None:
    way, site = _WAYS[call.name], script_site(call.frame)
    if call.name != "save_model":
        _cloned.update(map(_print, _parts(call.given)))
    if (call.name, site) not in _said:
        _said.add((call.name, site))
        why = f"{_LIE}; it is said once for this place"
        _warn(way.what.format(call.given.name), why=why, mend=way.mend, site=site)


def _warn(what: str, *, why: str, mend: str, site: Site) -> None:
    warning = NebulaWarning(what, where=str(site), why=why, mend=mend)
    warnings.warn_explicit(warning, NebulaWarning, site.file, site.line)


def _parts(model: Any) -> list[Any]:
    """The models that a model is made of, itself among them."""
    return [part for part in tf_private.layers_of(model) if _model(part)]


def _model(given: Any) -> bool:
    return isinstance(given, (tf_private.KerasFunction, tf_private.KerasSequential))


def _print(model: Any) -> _Print:
    """The names of a model's operations, inputs apart; a Sequential's are its layers."""
    found = model.operations if isinstance(model, tf_private.KerasFunction) else model.layers
    kept = (part for part in found if not isinstance(part, tf_private.KerasInput))
    return _Print(model.name, tuple(sorted((type(part).__name__, part.name) for part in kept)))
