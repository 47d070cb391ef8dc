"""The context manager behind every public scope."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

from whale_nebula.errors import NestingError
from whale_nebula.scopes import hints, identity
from whale_nebula.scopes.frames import Block, Frame, Stack, current_stack, keep_stack, open_frames, use_stack
from whale_nebula.scopes.options import decorator_error
from whale_nebula.site import Site, calling_site, is_running, script_site, short_traceback

LEVELS = ("cluster", "replica", "pipeline", "stage", "split")

_REPEATED_WHY = {
    "cluster": "a cluster block starts a program, and cannot be nested in another one",
    "replica": "replicas are copies of everything inside, and cannot be nested",
    "pipeline": "a batch is divided into micro-batches once",
    "stage": "stages follow one another, and cannot be nested",
    "split": "an operator can be sharded only once",
}
_REPEATED_FIX = {
    "cluster": "end the outer block first (dedent this line), or remove this one",
    "replica": "a single nb.replica(count) around both",
    "pipeline": "a single nb.pipeline(micro_batch=...) around all stages",
    "stage": "end the first stage before this line (dedent it), or remove one of them",
    "split": "a single nb.split(...) around the operators",
}


def resolve_stack(kind: str, site: Site, stack: Stack) -> Stack:
    """The stack on which a new scope opens; raises if it may not open here.

    Replayed frames are dropped: a scope entered in a layer's `call` overrides those in which the layer was built.
    """
    replayed = tuple(frame for frame in stack.frames[: stack.replayed] if not excludes(frame.kind, kind))
    entered = stack.frames[stack.replayed :]
    for frame in entered:
        if excludes(frame.kind, kind):
            raise _nesting_error(kind, site, frame, around_step=frame in stack.around_step)
    return replace(stack, frames=(*replayed, *entered), replayed=len(replayed))


def excludes(outer: str, inner: str) -> bool:
    """Whether a scope of kind `inner` must not be inside one of kind `outer`.

    >>> excludes("stage", "pipeline"), excludes("pipeline", "stage"), excludes("stage", "compress")
    (True, False, False)
    >>> excludes("pipeline", "replica"), excludes("replica", "pipeline")
    (False, False)
    """
    if inner == "compress" or (outer, inner) == ("pipeline", "replica"):
        return False
    if outer == "compress":
        return inner == "cluster"
    return LEVELS.index(outer) >= LEVELS.index(inner)


def _nesting_error(kind: str, site: Site, outer: Frame, *, around_step: bool) -> NestingError:
    what = f"nb.{kind} inside nb.{outer.kind} at {outer.site}"
    why = f"the order from outside to inside is {' > '.join(LEVELS)}"
    mend = f"swap them:\nwith nb.{kind}(...):\n    with nb.{outer.kind}(...):"
    if "layer" in outer.options:
        layer, cluster = outer.options["layer"], outer.cluster
        what = f"nb.{kind} in the code of layer {layer!r}, which nb.place at {outer.site} assigns to {cluster!r}"
        why = "a layer gets its stage from its own code or from nb.place, not from both"
        mend = f"remove nb.{kind} from the code, or the layer from nb.place"
    elif around_step and outer.kind in ("stage", "split"):
        what = f"a step with nb.{kind} at {site} is called inside nb.{outer.kind} at {outer.site}"
        why = f"nb.{outer.kind} contains a part of a step, and cannot enclose a whole step"
        mend = f"end nb.{outer.kind} before the step is called: dedent the call of fit, or of the function"
        site = script_site()
    elif not is_running(outer.site):
        what = f"nb.{kind} is entered while nb.{outer.kind} at {outer.site} is still open"
        why = "the code that opened it (a suspended generator, a call of __enter__) has not closed it"
        mend = f"use with nb.{outer.kind}(...): directly around the lines of the stage, without yield inside"
    elif kind == outer.kind:
        why, mend = _REPEATED_WHY[kind], _REPEATED_FIX[kind]
    elif outer.kind == "compress":
        why = "nb.compress must be inside a cluster block, not around it"
    return NestingError(what, where=str(site), why=why, mend=mend)


class Scope(contextlib.AbstractContextManager[Frame]):
    """A scope as it was written: its `kind` and validated `options`. Each entry creates a frame."""

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self.kind = kind
        self.options: Mapping[str, Any] = MappingProxyType(dict(options))
        self._open: dict[Frame, contextlib.ExitStack] = {}
        self._site = hints.record_creation(repr(self))

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self.options.items() if value is not None)
        return f"nb.{self.kind}({', '.join(options)})"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise: a scope is not a decorator, but applies to the code inside its block."""
        hints.record_entry(self._site)  # this error replaces the warning that it was never entered
        raise decorator_error(self.kind)

    def record_placement(self) -> None:
        """Record that it is used in a map of `nb.place` instead of being entered."""
        hints.record_entry(self._site)

    @short_traceback
    def __enter__(self) -> Frame:
        hints.record_entry(self._site)
        site = calling_site()
        around = resolve_stack(self.kind, site, current_stack())
        frame = self._create_frame(site, around)
        with contextlib.ExitStack() as opening:
            if self.kind == "stage":
                opening.enter_context(hints.watch_stage(frame, around))
            opening.enter_context(use_stack(replace(around, frames=(*around.frames, frame))))
            self._open[frame] = opening.pop_all()
        return frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frames = open_frames()
        if not frames or frames[-1] not in self._open:
            self._close_out_of_order(frames, error)
            return
        try:
            self._open.pop(frames[-1]).__exit__(kind, error, trace)
            if error is None and self.options.get("sync_every") is not None:
                hints.warn_idle(frames[-1], repr(self))
        finally:
            if frames[-1].touched and len(frames) > 1:
                frames[-2].touched = True

    def _close_out_of_order(self, frames: Sequence[Frame], error: BaseException | None) -> None:
        """Close the scope with all open scopes inside, so that the stack is clean, and report the wrong order once."""
        ended = next((frame for frame in self._open if frame.closed), None)
        if ended is not None:
            with keep_stack():
                self._open.pop(ended).close()
            return
        mine = next((number for number, frame in enumerate(frames) if frame in self._open), None)
        inside = frames[mine + 1 :] if mine is not None else ()
        if mine is not None:
            self._open[frames[mine]].close()
        for frame in frames[mine:] if mine is not None else ():
            frame.closed = True
        if error is None or isinstance(error, GeneratorExit):
            inner = (
                f"while another scope is open inside it: nb.{inside[-1].kind} at {inside[-1].site}" if inside else ""
            )
            what = f"nb.{self.kind} is closed {inner or 'in a different context than it was opened in'}"
            why = "scopes must be closed from inside to outside, in the thread that opened them"
            mend = f"use with nb.{self.kind}(...): without yield or a change of threads inside"
            raise NestingError(what, where=str(calling_site()), why=why, mend=mend)

    def _create_frame(self, site: Site, around: Stack) -> Frame:
        cluster, name = self.options.get("cluster"), self.options.get("name")
        if self.kind == "stage":
            place = identity.find_open_place(around)
            key, home = identity.identify_stage(name, cluster, site, around)
            return Frame(
                self.kind, self.options, site, key=key, cluster=home, building=hints.is_in_build(), place=place
            )
        in_block = any(frame.block is not None for frame in around.frames)
        block = Block() if self.kind in ("cluster", "replica", "pipeline") and not in_block else None
        return Frame(self.kind, self.options, site, cluster=name if self.kind == "cluster" else None, block=block)
