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
class KnownStage:
    """A stage entered in a block: its cluster, and where it was entered first."""

    cluster: str
    site: Site


@dataclass(slots=True, eq=False)
class Block:
    """The stages entered in one run of the outermost `cluster`, `replica` or `pipeline` block: how many, and which.

    Stages outside any block (`open`) may belong to several programs, so only their number is recorded.
    """

    open: bool = False
    entries: int = 0
    stages: dict[str, KnownStage] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Frame:
    """One entry of a scope; two frames are equal only if they are the same one.

    `touched` is set when an op or a Keras layer is created in the scope. `closed` is set if an enclosing
    scope ended first, `building` if it was entered in the `build` of a Keras layer. A stage outside any block has a
    `place` in the order of those; its number is `assigned_number` when a step that contains it is captured: see
    `identity.StageNumbers`.
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
    assigned_number: int | None = None


class Watcher(Protocol):
    """Object whose `enter` is called for every scope that opens."""

    def enter(self, frame: Frame) -> contextlib.AbstractContextManager[None]:
        """A context that is open as long as the scope is."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The value of the ContextVar: the open frames and their surroundings.

    The first `replayed` frames were not entered here but opened again by `reenter`. `block` counts the stages
    outside any `cluster` block. While a step is traced, `around_step` are the frames that it is called in.
    """

    frames: tuple[Frame, ...] = ()
    replayed: int = 0
    around_step: tuple[Frame, ...] = ()
    block: Block = field(default_factory=lambda: Block(open=True))


_STACK: ContextVar[Stack] = ContextVar("whale_nebula_scopes", default=Stack())  # noqa: B039 - one for all contexts
watchers: list[Watcher] = []
"""The watchers that are called for every scope that opens."""


def current_stack() -> Stack:
    """The stack of this context."""
    return _STACK.get()


def open_frames() -> tuple[Frame, ...]:
    """The frames of the scopes that are open, from the outermost to the innermost."""
    return _STACK.get().frames


@contextlib.contextmanager
def use_stack(stack: Stack) -> Iterator[None]:
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
    """Restore the stack at the end of this context, after any scopes closed inside."""
    stack = _STACK.get()
    try:
        yield
    finally:
        _STACK.set(stack)


def reenter(frames: Sequence[Frame]) -> contextlib.AbstractContextManager[None]:
    """Open exactly these frames, unchanged: without checks, counting or new numbers.

    A scope that is entered inside, in a layer's `call`, overrides them: see `scope.resolve_stack`.
    """
    return use_stack(replace(_STACK.get(), frames=tuple(frames), replayed=len(frames)))


def impose_frames(frames: Sequence[Frame]) -> contextlib.AbstractContextManager[None]:
    """Open exactly these frames; scopes entered inside are checked against them, as if they were written here."""
    return use_stack(replace(_STACK.get(), frames=tuple(frames), replayed=0))


def begin_step() -> contextlib.AbstractContextManager[None]:
    """Context in which a step is traced: stages outside any block are counted from `stage0` on, as in a `cluster`
    block.
    """
    stack = _STACK.get()
    return use_stack(replace(stack, block=Block(), around_step=stack.frames))


@contextlib.contextmanager
def rewatch_frames() -> Iterator[None]:
    """Call watchers for the scopes around a traced step, except for stages, which must be inside it."""
    with contextlib.ExitStack() as opened:
        for frame in open_frames():
            for watcher in tuple(watchers) if frame.kind not in ("stage", "split") else ():
                opened.enter_context(watcher.enter(frame))
        yield


def mark_open_frames() -> None:
    """Mark the open scopes as used: a step runs inside them."""
    for frame in open_frames():
        frame.touched = True


ENCLOSING_KINDS = ("cluster", "replica", "pipeline", "compress")
"""The scopes that may enclose a step, such as a call of `fit`; a stage must be inside the step."""


def describe_open_scopes() -> tuple[tuple[str, str], ...]:
    """The open scopes as far as they affect a step that is called in them, in a form that can be compared."""
    return tuple(
        (frame.kind, repr(sorted(frame.options.items()))) for frame in open_frames() if frame.kind in ENCLOSING_KINDS
    )


def find_innermost(kind: str, frames: Sequence[Frame]) -> Frame | None:
    """The innermost scope of a kind among these frames."""
    return next((frame for frame in reversed(frames) if frame.kind == kind), None)


cluster_block_of = partial(find_innermost, "cluster")
replica_of = partial(find_innermost, "replica")
stage_of = partial(find_innermost, "stage")
compress_of = partial(find_innermost, "compress")
split_of = partial(find_innermost, "split")
