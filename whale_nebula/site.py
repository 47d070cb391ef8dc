"""Source lines of the user's script, of calls and of ops, and tracebacks that end there."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import NamedTuple, ParamSpec, TypeVar

from whale_nebula.errors import NebulaError, NebulaWarning

P = ParamSpec("P")
T = TypeVar("T")

_OURS = str(Path(__file__).resolve().parent) + "/"
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + "/"
_WRAPPERS = ("contextlib.py", "functools.py")
_AUTOGRAPH = "/tensorflow/python/autograph/"


class Site(NamedTuple):
    """A line of the user's code.

    >>> str(Site("train.py", 12))
    'train.py:12'
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_UNKNOWN = Site("<unknown>", 0)
_THREAD_SITE: ContextVar[Site] = ContextVar("whale_nebula_thread_site", default=_UNKNOWN)


@contextlib.contextmanager
def use_thread_site(site: Site) -> Iterator[None]:
    """Context in a thread whose stack has no line of the user's code: `site` is reported where there is no other."""
    before = _THREAD_SITE.set(site)
    try:
        yield
    finally:
        _THREAD_SITE.reset(before)


def thread_site() -> Site | None:
    """The site that `use_thread_site` has set; None outside of such a context."""
    site = _THREAD_SITE.get()
    return site if site.line else None


def calling_site() -> Site:
    """The innermost line on Python's stack outside this package, contextlib, functools and AutoGraph: the caller's, in
    the script or in an installed package.
    """
    return _find_site(sys._getframe(1), lambda file: False)


def script_site(start: FrameType | None = None) -> Site:
    """The script's line: the innermost one on Python's stack (from `start` outwards) that is in no installed package,
    nor in the standard library.
    """
    return _find_site(start or sys._getframe(1), _is_installed)


def _find_site(frame: FrameType | None, is_skipped: Callable[[str], bool]) -> Site:
    """The innermost line in a file that is not skipped; without one, the site of this thread, or an unknown one."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_machinery(file) and not is_skipped(file):
            site = _find_original_line(Site(file, frame.f_lineno), frame)
            if not _is_machinery(site.file):
                return site
        frame = frame.f_back
    return _THREAD_SITE.get()


def warn_at(site: Site, what: str, *, why: str, mend: str, where: str | None = None) -> None:
    """Warn about a line, which is the warning's location unless `where` is given."""
    warning = NebulaWarning(what, where=str(site) if where is None else where, why=why, mend=mend)
    warnings.warn_explicit(warning, NebulaWarning, site.file, site.line)


_warned: set[tuple[Site, Hashable]] = set()


def warn_once(site: Site, what: str, *, why: str, mend: str, where: str | None = None, key: Hashable = None) -> None:
    """Warn about a line, unless there was a warning with the same `key` there."""
    if (site, key) not in _warned:
        _warned.add((site, key))
        warn_at(site, what, why=why, mend=mend, where=where)


def is_running(site: Site) -> bool:
    """Whether the function that contains a line is running in this thread; a suspended generator is not.

    True also inside any function that AutoGraph rewrote, whose lines are unknown.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "__autograph_generated_file" in code.co_filename:
            return True
        if code.co_filename == site.file and any(line == site.line for *_, line in code.co_lines()):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<frozen", _STANDARD_LIBRARY))


@functools.cache
def _is_machinery(file: str) -> bool:
    return file.startswith(_OURS) or file.endswith(_WRAPPERS) or _AUTOGRAPH in file


def _find_original_line(site: Site, frame: FrameType) -> Site:
    """The line of the user's source if `tf.function` runs a rewritten copy of it.

    AutoGraph writes the copy to another file and attaches a source map to the new function, which is held by the
    calling frame.
    """
    caller = frame.f_back if "__autograph_generated_file" in site.file else None
    while caller is not None:
        origins = getattr(caller.f_locals.get("converted_f"), "ag_source_map", {})
        if (origin := origins.get((site.file, site.line))) is not None:
            return Site(origin.loc.filename, origin.loc.lineno)
        caller = caller.f_back
    return site


class Origin(str):
    """The user's line of an op, and the layer that made it: its path in the model and its class.

    >>> origin = Origin("train.py:12", layer="encoder/norm", kind="BatchNormalization")
    >>> print(origin, "|", origin.layer_description)
    train.py:12 | BatchNormalization 'encoder/norm'
    """

    __slots__ = ("kind", "layer")

    layer: str
    kind: str

    def __new__(cls, line: str, layer: str = "", kind: str = "") -> Origin:
        """Create from a line, with an optional layer."""
        origin = super().__new__(cls, line)
        origin.layer, origin.kind = layer, kind
        return origin

    @property
    def layer_description(self) -> str:
        """The layer in words; "" if there is none."""
        return f"{self.kind or 'layer'} {self.layer!r}" if self.layer else ""


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Start tracebacks of this library's errors at the public call that raises them.

    Like those of Keras and TensorFlow, tracebacks are complete after `keras.config.disable_traceback_filtering()`.

    >>> @short_traceback
    ... def call():
    ...     raise NebulaError("no")
    >>> try: call()
    ... except NebulaError as error: print(error.__traceback__.tb_next.tb_next)
    None
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except NebulaError as error:
            keras = sys.modules.get("keras")
            if keras is not None and not keras.config.is_traceback_filtering_enabled():
                raise
            raise error.with_traceback(None)  # noqa: B904 - it is the same error

    return wrapper
