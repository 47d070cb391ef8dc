"""Source locations of ops: the innermost stack frame outside TensorFlow, Keras and this package.

A functional model runs far from where it was built. There the line is that which called the layer while building.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from whale_nebula.site import Origin
from whale_nebula.tf import private as tf_private

BUILT = "_nebula_built"
"""Stamp of an op of a functional model: the line where its node was made."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_REPLAY = os.path.join(_OURS, "capture", "keras_scopes.py")


def place_of(op: Any) -> Origin:
    """'file.py:12', or the op's name where no frame is the user's; and the Keras layer around the op."""
    layers, file = tf_private.layers_around(op)
    inside = layers[1:] if len(layers) > 1 else layers
    return Origin(_line(op) or str(op.name), "/".join(inside), _class_in(file))


def _line(op: Any) -> str:
    """The user's innermost line; of what a functional model runs, only lines inside its layers count."""
    frames = tf_private.user_frames(op)
    built = tf_private.stamp_of(op, BUILT)
    if built:
        return _innermost(frames[_find_replayed_frame(frames) :]) or built
    return _innermost(frames)


def _find_replayed_frame(frames: Sequence[tuple[str, int]]) -> int:
    """The number of the first frame inside the innermost node that was replayed."""
    return max((number + 1 for number, (file, _) in enumerate(frames) if file == _REPLAY), default=0)


def _innermost(frames: Sequence[tuple[str, int]]) -> str:
    return next((f"{file}:{line}" for file, line in reversed(frames) if not foreign(file)), "")


def _class_in(file: str) -> str:
    """The Keras layer that a file of Keras holds, if it is one."""
    for module in list(sys.modules.values()) if file else ():
        if getattr(module, "__file__", None) == file:
            classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
            found = [each.__name__ for each in classes if each.__module__ == module.__name__]
            return found[0] if len(found) == 1 else ""
    return ""


def foreign(file: str) -> bool:
    """Whether a file belongs to a library and not to the user."""
    libraries = (_OURS, *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    return file.startswith("<") or file.startswith(libraries) or f"{os.sep}lib{os.sep}python" in file
