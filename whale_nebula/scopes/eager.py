"""A stage that caught nothing says so, once for each place.

Only our own trace of a step is cut. Plain eager code and a plain tf.function run as if no scope were there, and the
`build` of a Keras layer only makes variables.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes import identity
from whale_nebula.scopes.frames import Frame, Stack
from whale_nebula.site import Site

_MENDS = {
    "plain eager code": "call it from a function under @nb.function, or train the model with fit",
    "a plain tf.function": "use @nb.function instead of @tf.function, or train the model with fit",
    "the build of a layer": "enter it in call, where layers are called: build only makes their variables",
}
_said: set[tuple[Site, str]] = set()


@contextlib.contextmanager
def watched(frame: Frame, around: Stack) -> Iterator[None]:
    """Around a stage: warn when it ends without having caught anything."""
    code = "the build of a layer" if frame.building else running()
    try:
        yield
    finally:
        if not frame.touched:
            identity.release(around)
    if code is not None and not frame.touched:
        outermost = around.frames[0] if around.frames else frame
        then = "so this scope caught nothing"
        mend = _CALLED if code == "plain eager code" and _method() == "call" else _INSIDE.get(code)
        tell(frame, code, then, where=frame.site, program=outermost.site, mend=mend)


def running() -> str | None:
    """What kind of code runs, as far as TensorFlow knows; nothing is said where it is not even loaded."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    return "plain eager code" if tensorflow.executing_eagerly() else "a plain tf.function"


def builds() -> bool:
    """Whether the innermost method of a Keras layer that runs is its `build`, and not its `call`."""
    return _method() == "build"


def _method() -> str:
    """Which it is, "" where none of them runs; what Keras's own layers build is no `build` of the user's."""
    keras = sys.modules.get("keras")
    frame = sys._getframe(1) if keras is not None else None
    while frame is not None and keras is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("build", "call") else None
        if isinstance(owner, keras.Layer):
            own = frame.f_code.co_name == "call" or not _is_kerass(type(owner))
            return frame.f_code.co_name if own else ""
        frame = frame.f_back
    return ""


def _is_kerass(kind: type) -> bool:
    """Keras's own layers call others in their build: a Sequential, a functional model."""
    return kind.__module__.startswith("keras.")


_CALLED = (
    "nothing, if that call was only to make the model's variables (nb.plan(model, x, y) makes them, too);\n"
    "train it with fit, or call it in a function under @nb.function, and it is cut"
)
_INSIDE = {
    "plain eager code": "enter it where layers are called: while a functional model is built, in the model's call, "
    "or in a function under @nb.function;\nmaking layers in it, or calling fit, is not enough"
}


def tell(stage: Frame, code: str, then: str, *, where: Site, program: Site, mend: str | None = None) -> None:
    """Say that a stage runs uncut: once for a program and kind of code, not for each of its stages."""
    if (program, code) in _said:
        return
    _said.add((program, code))
    warning = NebulaWarning(
        f"stage {stage.key!r} runs uncut",
        where=str(where),
        why=f"{code} is not captured, {then}; it is said once for this place",
        mend=mend or _MENDS[code],
    )
    warnings.warn_explicit(warning, NebulaWarning, where.file, where.line)
