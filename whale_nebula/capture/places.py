"""The user's line behind an op: the innermost frame that is neither TensorFlow's, Keras's nor ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from whale_nebula import tf_private

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def place_of(op: Any) -> str:
    """'file.py:12', or the op's name where no frame is the user's."""
    return _innermost(tf_private.user_frames(op)) or str(op.name)


def _innermost(frames: Iterable[tuple[str, int]]) -> str:
    found = ""
    for file, line in frames:
        if not foreign(file):
            found = f"{file}:{line}"
    return found


def foreign(file: str) -> bool:
    """Whether a file belongs to a library and not to the user."""
    libraries = (_OURS, *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    return file.startswith("<") or file.startswith(libraries) or f"{os.sep}lib{os.sep}python" in file
