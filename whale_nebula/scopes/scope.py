"""What `with nb.stage(...):` enters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import NamedTuple, NoReturn

from whale_nebula.errors import NestingError, NotYetError
from whale_nebula.errors.tracebacks import short_traceback
from whale_nebula.scopes import eager, identity, unentered
from whale_nebula.scopes.frames import Block, Frame, Stack, current_stack, open_frames, standing, unmoved
from whale_nebula.scopes.grammar import settle
from whale_nebula.scopes.words import no_decorator
from whale_nebula.site import Site, calling_site


class Missing(NamedTuple):
    """A feature that has no engine yet."""

    feature: str
    why: str | None = None
    mend: str | None = None

    def error(self, site: Site) -> NotYetError:
        """The error for a use of it."""
        return NotYetError(self.feature, where=str(site), why=self.why, mend=self.mend)


class Scope(contextlib.AbstractContextManager[Frame]):
    """A scope as it was written, with options that are already checked; each entry of it makes a frame."""

    def __init__(self, kind: str, options: Mapping[str, object], missing: Missing | None = None) -> None:
        self._kind = kind
        self._options = MappingProxyType(dict(options))
        self._missing = missing
        self._open: dict[Frame, contextlib.ExitStack] = {}
        self._made = unentered.made(repr(self))

    @property
    def kind(self) -> str:
        """Which scope it is: cluster, stage and so on."""
        return self._kind

    @property
    def options(self) -> Mapping[str, object]:
        """What was written between its parentheses."""
        return self._options

    def __repr__(self) -> str:
        said = (f"{name}={value!r}" for name, value in self._options.items() if value is not None)
        return f"nb.{self._kind}({', '.join(said)})"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Scopes are no decorators: what they hold is written inside them."""
        unentered.refused(self._made)
        raise no_decorator(self._kind)

    def given(self) -> None:
        """It is not to be entered: something else, a map of places, takes what it says."""
        unentered.entered(self._made)

    @short_traceback
    def __enter__(self) -> Frame:
        unentered.entered(self._made)
        site = calling_site()
        around = settle(self._kind, site, current_stack())
        frame = self._frame(site, around)
        self._admit(frame, around)
        with contextlib.ExitStack() as opening:
            if self._kind == "stage" and around.recorder is None:
                opening.enter_context(eager.watched(frame, around))
            opening.enter_context(standing(replace(around, frames=(*around.frames, frame))))
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
            if error is None and self._options.get("sync_every") is not None and current_stack().recorder is None:
                unentered.tell_idle(frames[-1], repr(self))
        finally:
            if frames[-1].touched and len(frames) > 1:
                frames[-2].touched = True

    def _close_out_of_order(self, frames: Sequence[Frame], error: BaseException | None) -> None:
        """Close all the same, with what is open inside, so that the stack is clean; and say so, once."""
        ended = next((frame for frame in self._open if frame.closed), None)
        if ended is not None:
            with unmoved():
                self._open.pop(ended).close()
            return
        mine = next((number for number, frame in enumerate(frames) if frame in self._open), None)
        inside = frames[mine + 1 :] if mine is not None else ()
        if mine is not None:
            self._open[frames[mine]].close()
        for frame in frames[mine:] if mine is not None else ():
            frame.closed = True
        if error is None or isinstance(error, GeneratorExit):
            raise self._out_of_order(inside)

    def _frame(self, site: Site, around: Stack) -> Frame:
        cluster, name = self._options.get("cluster"), self._options.get("name")
        if self._kind == "stage":
            place = identity.place_in_open(around)
            key, home = identity.identify(_text(name), _text(cluster), site, around)
            return Frame(self._kind, self._options, site, key=key, cluster=home, building=eager.builds(), place=place)
        opens_block = self._kind in ("cluster", "replica", "pipeline") and not _has_block(around)
        return Frame(
            self._kind,
            self._options,
            site,
            cluster=_text(name) if self._kind == "cluster" else None,
            block=Block() if opens_block else None,
        )

    def _admit(self, frame: Frame, around: Stack) -> None:
        """Refuse what has no engine yet, unless scopes are only being parsed."""
        if around.recorder is not None:
            around.recorder.scope(frame, around.frames, self._missing.feature if self._missing else None)
        elif self._missing is not None:
            raise self._missing.error(frame.site)

    def _out_of_order(self, inside: Sequence[Frame]) -> NestingError:
        inner = f"while another scope is open inside it: nb.{inside[-1].kind} at {inside[-1].site}" if inside else ""
        return NestingError(
            f"nb.{self._kind} is closed {inner or 'in another context than it was opened in'}",
            where=str(calling_site()),
            why="scopes close from the inside to the outside, in the thread that opened them",
            mend=f"with nb.{self._kind}(...): and nothing that yields or changes threads inside it",
        )


def _has_block(stack: Stack) -> bool:
    return any(frame.block is not None for frame in stack.frames)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
