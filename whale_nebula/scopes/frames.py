"""The stack of open scopes, and its watchers.

A frame is one entry of a scope. Capture watches frames to stamp ops; a functional Keras model keeps those in
which it was built and opens the same ones again (`reenter`) when it is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from whale_nebula.site import Site


@dataclass(frozen=True, slots=True)
class Known:
    """A stage that a block has seen: its cluster, and where it was entered first."""

    cluster: str
    site: Site


@dataclass(slots=True, eq=False)
class Block:
    """What one run of a `cluster` block remembers of the stages in it: how many were entered, and which.

    What stands in no block at all (`open`) may belong to several programs: there only the number counts.
    """

    open: bool = False
    entries: int = 0
    stages: dict[str, Known] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Frame:
    """One entry of a scope; two frames are equal only if they are the same one.

    `touched` is set by watchers as soon as the scope really caught something: an op, a Keras layer. `closed` says
    that a scope around it has ended before it did, `building` that it was entered in the `build` of a Keras layer.
    A stage that stands in no block has a `place` in the order of those; its number is `dealt` when a step that has it
    is captured: see `identity.Numbers`.
    """

    kind: str
    options: Mapping[str, Any]
    site: Site
    key: str | None = None
    cluster: str | None = None
    block: Block | None = None
    touched: bool = False
    closed: bool = False
    building: bool = False
    place: int | None = None
    dealt: int | None = None


class Watcher(Protocol):
    """Callback for every scope that opens."""

    def enter(self, frame: Frame) -> contextlib.AbstractContextManager[None]:
        """A context that is open as long as the scope is."""


class Recorder(Protocol):
    """Takes down what is written, instead of running it."""

    def scope(self, frame: Frame, around: Sequence[Frame], missing: str | None) -> None:
        """A scope was entered inside `describe_open_scopes`; `missing` names what has no engine yet."""

    def statement(self, text: str, around: Sequence[Frame], missing: str | None) -> None:
        """Something that is no scope was called."""


@dataclass(frozen=True, slots=True)
class Stack:
    """All that the one ContextVar holds.

    The first `replayed` frames were not entered here but opened again by `reenter`. `block` counts the stages
    that stand in no block of their own. While a step is traced, `around_step` are the frames that it is called in.
    """

    frames: tuple[Frame, ...] = ()
    replayed: int = 0
    around_step: tuple[Frame, ...] = ()
    block: Block = field(default_factory=lambda: Block(open=True))
    recorder: Recorder | None = None


_STACK: ContextVar[Stack] = ContextVar("whale_nebula_scopes", default=Stack())  # noqa: B039 - one for all contexts
watchers: list[Watcher] = []


def add_watcher(watcher: Watcher) -> None:
    """Tell `watcher` of every scope from now on."""
    watchers.append(watcher)


def current_stack() -> Stack:
    """The stack of this context."""
    return _STACK.get()


def open_frames() -> tuple[Frame, ...]:
    """The frames of the scopes that are open, from the outermost to the innermost."""
    return _STACK.get().frames


@contextlib.contextmanager
def standing(stack: Stack) -> Iterator[None]:
    """Make `stack` the stack of open scopes; watchers are called for frames that were not open before."""
    before = _STACK.get()
    fresh = [frame for frame in stack.frames if frame not in before.frames]
    _STACK.set(stack)
    try:
        with contextlib.ExitStack() as opened:
            for frame in fresh:
                for watcher in tuple(watchers):
                    opened.enter_context(watcher.enter(frame))
            yield
    finally:
        _STACK.set(before)


@contextlib.contextmanager
def keep_stack() -> Iterator[None]:
    """Leave the stack as it is, whatever is closed inside."""
    stack = _STACK.get()
    try:
        yield
    finally:
        _STACK.set(stack)


def reenter(frames: Sequence[Frame]) -> contextlib.AbstractContextManager[None]:
    """Open exactly these frames, as they are: not checked, not counted, not numbered again.

    A scope that is entered inside, in a layer's `call`, beats them: see `scope.settle`.
    """
    return standing(replace(_STACK.get(), frames=tuple(frames), replayed=len(frames)))


def impose_frames(frames: Sequence[Frame]) -> contextlib.AbstractContextManager[None]:
    """Open exactly these frames; what is entered inside must fit in them, as if they were written here."""
    return standing(replace(_STACK.get(), frames=tuple(frames), replayed=0))


def begin_step() -> contextlib.AbstractContextManager[None]:
    """A step is traced inside: stages that stand in no block are counted from `stage0` on, as a `cluster` block counts
    those inside it.
    """
    stack = _STACK.get()
    return standing(replace(stack, block=Block(), around_step=stack.frames))


@contextlib.contextmanager
def watched_anew() -> Iterator[None]:
    """Tell watchers of the scopes around a step, now that it is traced: all but stages, which must lie inside it."""
    with contextlib.ExitStack() as opened:
        for frame in open_frames():
            for watcher in tuple(watchers) if frame.kind not in ("stage", "split") else ():
                opened.enter_context(watcher.enter(frame))
        yield


def hold_something() -> None:
    """A step runs inside the scopes that are open."""
    for frame in open_frames():
        frame.touched = True


AROUND = ("cluster", "replica", "pipeline", "compress")
"""The scopes that may stand around a step, around `fit` say; what a stage holds must lie inside it."""


def describe_open_scopes() -> tuple[tuple[str, str], ...]:
    """What the scopes that are open say to a step that is called in them, as something that can be compared."""
    return tuple((frame.kind, repr(sorted(frame.options.items()))) for frame in open_frames() if frame.kind in AROUND)


def innermost(kind: str, frames: Sequence[Frame]) -> Frame | None:
    """The innermost scope of a kind among these frames."""
    return next((frame for frame in reversed(frames) if frame.kind == kind), None)


cluster_block_of = partial(innermost, "cluster")
replica_of = partial(innermost, "replica")
stage_of = partial(innermost, "stage")
compress_of = partial(innermost, "compress")
split_of = partial(innermost, "split")
