"""Warn when a model that was built under scopes is copied: the copy has no scopes.

Scopes are attached to the calls of layers. `clone_model`, `save` and `copy.deepcopy` copy by configs, which contain no
calls; so `get_config` of each layer with scopes is watched, and the copying function is found on the stack. A model
that is loaded or made from a config later is only recognised by its names: the warning is given at its first training.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import keras

from whale_nebula.scopes.frames import Frame, open_frames, stage_of
from whale_nebula.site import script_site, warn_at, warn_once
from whale_nebula.tf import private as tf_private

Frames = tuple[Frame, ...]

_TAG, _LINE = "_nebula_frames", "_nebula_line"


def frames_of(tagged: Any) -> Frames:
    """The scopes in which a node, its original if it is a copy, or a Sequential's layer was made."""
    found: Frames | None = getattr(tagged, _TAG, None)
    if found is None and isinstance(tagged, tf_private.KerasNode):
        original = tf_private.find_original(tagged)
        found = None if original is None else frames_of(original)
    return found or ()


def tag(target: Any, frames: Frames) -> None:
    """Attach scopes to a node or a Sequential's layer."""
    object.__setattr__(target, _TAG, frames)
    object.__setattr__(target, _LINE, str(script_site()))


def built_at(tagged: Any) -> str:
    """The user's line that made a node, or added a Sequential's layer; empty outside of scopes."""
    found: str = getattr(tagged, _LINE, "")
    return found


def built_under_scopes(model: Any) -> bool:
    """Whether a model, or one inside it, was built under scopes."""
    return any(frames_of(each) for part in tf_private.layers_of(model) for each in (part, *nodes_of(part)))


def stages_of(model: Any) -> list[Frame]:
    """The stages in which a model, or a functional one inside it, was built; in a Sequential those of its layers."""
    found: list[Frame] = []
    for part in tf_private.layers_of(model):
        nodes = [] if isinstance(part, tf_private.KerasSequential) else nodes_of(part)
        stages = (stage_of(frames_of(each)) for each in (part, *nodes))
        found.extend(frame for frame in stages if frame is not None)
    return found


def nodes_of(layer: Any) -> list[Any]:
    """The nodes of a functional model, or of the one inside a Sequential; none of another layer."""
    return [node for level in tf_private.nodes_by_depth(layer).values() for node in level]


_LIE = "scopes lie on the calls of layers, and the configs that models are copied by hold none"
_BUILD = "build it by the same code, under the scopes"
_PLACE = 'or nb.place(model, {"layer/.*": "cluster", ...})'


_AGAIN = f"{_BUILD}, {_PLACE}"
_WAYS = {
    "clone_model": ("the clone of model {!r} has no scopes", _AGAIN),
    "__reduce__": ("the copy of model {!r} has no scopes", _AGAIN),
    "save_model": (
        "model {!r} is saved without its scopes",
        f"to train it again by a plan, {_BUILD}, and load_weights(file), {_PLACE} after load_model(file)",
    ),
}
"""Keras's functions that copy a model, with the texts on the copy and on what to do."""


class _Fingerprint(NamedTuple):
    """The features that a model shares with its copies."""

    model: str
    operations: tuple[tuple[str, str], ...]


_given: set[_Fingerprint] = set()
_cloned: set[_Fingerprint] = set()
"""Fingerprints of clones with a warning that have not run yet: no second warning is given when they do."""
_told: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models with a warning that they run uncut, by identity: another model of the same layers is warned of, too."""


def watch(operation: Any) -> None:
    """Watch for the config of this layer or operation, which was called under scopes."""
    if not hasattr(operation.get_config, "nebula_heard"):
        tf_private.call_on_config(operation, find_copy_by_user)
        operation.get_config.nebula_heard = True


def tell_if_copy(model: Any) -> None:
    """Warn of a model without scopes, about to run, with the same layers as one with scopes."""
    parts = _parts(model) if _given else []
    clones = [part for part in parts if _fingerprint(part) in _cloned]
    _told.update(clones)
    _cloned.difference_update(map(_fingerprint, clones))
    copy = next((part for part in parts if _fingerprint(part) in _given), None)
    if copy is not None and copy not in _told:
        _told.add(copy)
        warn_at(
            script_site(),
            f"model {copy.name!r} runs uncut",
            why=f"it has no scopes, and a model of this name and these layers that was saved had some: {_LIE}",
            mend=f"{_BUILD}, and load_weights(file), {_PLACE};\n"
            f"one that is meant to run uncut has a name of its own: keras.Model(..., name={copy.name + '_uncut'!r})",
        )


def find_copy_by_user() -> None:
    """Warn of a copy that is being made or saved, at the outermost call of Keras that copies a whole model."""
    calls = [call for call in tf_private.keras_calls() if isinstance(call.given, keras.Model)]
    found = next((call for call in reversed(calls) if call.name in _WAYS), None)
    saved = found is not None and found.name == "save_model"
    if found is None or saved:
        _given.update(_fingerprint(call.given) for call in calls if call.name == "get_config" and _is_model(call.given))
    # a copy made inside a stage gets scopes of its own; `nb.cluster` alone adds none
    if found is None or not built_under_scopes(found.given) or (not saved and stage_of(open_frames())):
        return
    if not saved:
        _cloned.update(map(_fingerprint, _parts(found.given)))
    what, mend = _WAYS[found.name]
    site, why = script_site(found.frame), f"{_LIE}; it is said once for this place"
    warn_once(site, what.format(found.given.name), why=why, mend=mend, key=found.name)


def _parts(model: Any) -> list[Any]:
    """A model and its nested models."""
    return [part for part in tf_private.layers_of(model) if _is_model(part)]


def _is_model(given: Any) -> bool:
    return isinstance(given, (tf_private.KerasFunction, tf_private.KerasSequential))


def _fingerprint(model: Any) -> _Fingerprint:
    """The names of a model's operations without inputs; for a Sequential those of its layers."""
    found = model.operations if isinstance(model, tf_private.KerasFunction) else model.layers
    kept = (part for part in found if not isinstance(part, tf_private.KerasInput))
    return _Fingerprint(model.name, tuple(sorted((type(part).__name__, part.name) for part in kept)))
