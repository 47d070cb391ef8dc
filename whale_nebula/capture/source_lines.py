"""Source locations of ops.

The location of an op is the innermost stack frame outside TensorFlow, Keras and this package. For a functional model,
which runs elsewhere than it was built, it is the line that called the layer while building.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from whale_nebula.site import Origin
from whale_nebula.tf import private as tf_private

BUILT = "_nebula_built"
"""Stamp of an op of a functional model: the line where its node was made."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_REPLAY = os.path.join(_OURS, "capture", "keras_scopes.py")


def find_origin(op: Any) -> Origin:
    """'file.py:12', or the op's name if no frame is the user's; and the Keras layer around the op."""
    layers, file = tf_private.layers_around(op)
    inside = layers[1:] if len(layers) > 1 else layers
    return Origin(_line(op) or str(op.name), "/".join(inside), _class_in(file))


def _line(op: Any) -> str:
    """The user's innermost source line; for ops of a functional model only lines within the replayed node count."""
    frames = tf_private.user_frames(op)
    built = tf_private.stamp_of(op, BUILT)
    start = max((number + 1 for number, (file, _) in enumerate(frames) if file == _REPLAY), default=0) if built else 0
    return next((f"{file}:{line}" for file, line in reversed(frames[start:]) if not foreign(file)), built)


def _class_in(file: str) -> str:
    """The Keras layer that a file of Keras defines, if any."""
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
