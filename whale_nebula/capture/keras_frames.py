"""The scopes that Keras's objects were made in, as they lie on them: read here, written by `keras_tags`."""

from __future__ import annotations

from typing import Any

from whale_nebula import scopes
from whale_nebula.scopes import Frame
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

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
