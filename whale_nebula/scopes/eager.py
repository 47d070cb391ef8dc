"""A stage in plain eager code catches nothing: that is said once for each place."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes import identity
from whale_nebula.scopes.frames import Frame, Stack
from whale_nebula.scopes.site import Site

_said: set[Site] = set()


@contextlib.contextmanager
def watched(frame: Frame, around: Stack) -> Iterator[None]:
    """Around a stage: warn when it ends without having caught anything, in eager code."""
    eager = executing_eagerly()
    try:
        yield
    finally:
        if not frame.touched:
            identity.release(around)
    if eager and not frame.touched and frame.site not in _said:
        _said.add(frame.site)
        _warn(frame)


def executing_eagerly() -> bool:
    """Whether TensorFlow runs ops as they are written; not so where it is not even loaded."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and bool(tensorflow.executing_eagerly())


def _warn(frame: Frame) -> None:
    warning = NebulaWarning(
        f"stage {frame.key!r} runs uncut",
        where=str(frame.site),
        why="plain eager code is not captured, so this scope caught nothing; it is said once for this line",
        mend="call it from a function under @nb.function, or train the model with fit",
    )
    warnings.warn_explicit(warning, NebulaWarning, frame.site.file, frame.site.line)
