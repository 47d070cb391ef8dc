"""Warnings of scopes without effect: created but never entered, such as `nb.stage(cluster="gpu")` without `with`, or
entered around code that is not captured.

That a scope was never entered is reported when a model or a step is about to run: if the scope was meant to be used, it
is missing by then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from whale_nebula.scopes import identity
from whale_nebula.scopes.frames import ENCLOSING_KINDS, Frame, Stack
from whale_nebula.site import Site, calling_site, warn_at

_unentered: dict[Site, str] = {}
_entered: set[Site] = set()
_idle: set[Site] = set()


def record_creation(written: str) -> Site:
    """Record that a scope is created on this line of the script; `written` is its text. Returns the line."""
    site = calling_site()
    if site not in _entered:
        _unentered.setdefault(site, written)
    return site


def record_entry(site: Site) -> None:
    """Record that a scope created on a line was entered; this covers all scopes created there."""
    _unentered.pop(site, None)
    _entered.add(site)


def forget() -> None:
    """Discard the records of created, entered and idle scopes (between tests)."""
    _unentered.clear()
    _entered.clear()
    _idle.clear()


def warn_unscoped(model: str) -> None:
    """Warn once of each scope that was never entered: the model of this name is about to run without scopes."""
    _warn(f"model {model!r} runs uncut")


def warn_missing_scope(step: str) -> None:
    """Warn once of each scope that was never entered: the step of this name, with other scopes, is about to run."""
    _warn(f"step {step!r} runs without it")


def warn_idle(frame: Frame, written: str) -> None:
    """Warn, once for each line, of a scope of local SGD in which no step ran by a plan, for example a loop without
    @nb.function.
    """
    if frame.touched or frame.building or frame.site in _idle:
        return
    _idle.add(frame.site)
    warn_at(
        frame.site,
        f"{written} contains no step that runs by a plan",
        why="the code inside ran in this process only, as if the scope were not there",
        mend="use @nb.function instead of @tf.function for the step of a loop, or call fit inside the scope",
    )


def _warn(consequence: str) -> None:
    for site, written in list(_unentered.items()):
        record_entry(site)
        encloses_step = written.startswith(tuple(f"nb.{kind}" for kind in ENCLOSING_KINDS))
        warn_at(
            site,
            f"{written} is never entered",
            why=f"a scope holds the lines inside its with block, and this one has none; {consequence}",
            mend=f"with {written}: and inside it the calls of the layers{', or the call of fit' * encloses_step}",
        )


_MENDS = {
    "plain eager code": "call it from a function under @nb.function, or train the model with fit",
    "a plain tf.function": "use @nb.function instead of @tf.function, or train the model with fit",
    "the build of a layer": "enter it in call, where layers are called: build only creates their variables",
}
_warned: set[tuple[Site, str]] = set()


@contextlib.contextmanager
def watch_stage(frame: Frame, around: Stack) -> Iterator[None]:
    """Context around a stage: if no op was created in it, release its number, and warn if its code is not captured."""
    code = "the build of a layer" if frame.building else find_code_kind()
    try:
        yield
    finally:
        if not frame.touched:
            identity.release_number(around)
    if code is not None and not frame.touched:
        program = around.frames[0].site if around.frames else frame.site
        mend = _MENDS[code]
        if code == "plain eager code":
            mend = _FIX_IN_CALL if _find_layer_method() == "call" else _FIX_OUTSIDE
        warn_eager(frame, code, "so this scope has no effect", where=frame.site, program=program, mend=mend)


def find_code_kind() -> str | None:
    """The kind of code that is running, according to TensorFlow; None if it is not loaded."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    return "plain eager code" if tensorflow.executing_eagerly() else "a plain tf.function"


def is_in_build() -> bool:
    """Whether the innermost running method of a Keras layer is `build` rather than `call`."""
    return _find_layer_method() == "build"


def _find_layer_method() -> str:
    """The innermost running `build` or `call` of a layer, or ""; the `build` of Keras's own layers is ignored."""
    keras = sys.modules.get("keras")
    frame = sys._getframe(1) if keras is not None else None
    while frame is not None and keras is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("build", "call") else None
        if isinstance(owner, keras.Layer):
            # Keras's own layers call others in their build: a Sequential, a functional model
            own = frame.f_code.co_name == "call" or not type(owner).__module__.startswith("keras.")
            return frame.f_code.co_name if own else ""
        frame = frame.f_back
    return ""


_FIX_IN_CALL = (
    "none needed if the call only created the model's variables (nb.plan(model, x, y) creates them, too);\n"
    "to cut the model, train it with fit, or call it in a function under @nb.function"
)
_FIX_OUTSIDE = (
    "enter it where layers are called: while a functional model is built, in the model's call, "
    "or in a function under @nb.function;\ncreating layers in it, or calling fit, is not enough"
)


def warn_eager(
    stage: Frame, code: str, consequence: str, *, where: Site, program: Site, mend: str | None = None
) -> None:
    """Warn that a stage runs uncut: once for a program and kind of code, not for each of its stages."""
    if (program, code) in _warned:
        return
    _warned.add((program, code))
    why = f"{code} is not captured, {consequence}; this warning is shown once for this line"
    warn_at(where, f"stage {stage.key!r} runs uncut", why=why, mend=mend or _MENDS[code])
