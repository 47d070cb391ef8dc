"""What `with nb.stage(...):` enters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import NamedTuple, NoReturn

from whale_nebula.errors import NestingError, NotYetError, ScopeError
from whale_nebula.scopes import eager, identity
from whale_nebula.scopes.frames import Block, Frame, Stack, current_stack, open_frames, standing
from whale_nebula.scopes.grammar import settle
from whale_nebula.scopes.site import Site, calling_site


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

    def __repr__(self) -> str:
        return f"nb.{self._kind}({', '.join(f'{name}={value!r}' for name, value in self._options.items())})"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Scopes are no decorators: what they hold is written inside them."""
        raise ScopeError(
            f"nb.{self._kind} is no decorator",
            where=str(calling_site()),
            why="a scope holds the lines that are written inside it",
            mend=f"with nb.{self._kind}(...): inside the function, around what belongs to it",
        )

    def __enter__(self) -> Frame:
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
        closing = self._open.pop(frames[-1], None) if frames else None
        if closing is None:
            raise self._out_of_order()
        try:
            closing.__exit__(kind, error, trace)
        finally:
            if frames[-1].touched and len(frames) > 1:
                frames[-2].touched = True

    def _frame(self, site: Site, around: Stack) -> Frame:
        cluster, name = self._options.get("cluster"), self._options.get("name")
        if self._kind == "stage":
            key, home = identity.identify(_text(name), _text(cluster), site, around)
            return Frame(self._kind, self._options, site, key=key, cluster=home)
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

    def _out_of_order(self) -> NestingError:
        return NestingError(
            f"nb.{self._kind} is closed while another scope is open inside it, or in another context",
            where=str(calling_site()),
            why="scopes close from the inside to the outside, in the thread that opened them",
            mend=f"with nb.{self._kind}(...): and nothing that yields or changes threads inside it",
        )


def _has_block(stack: Stack) -> bool:
    return any(frame.block is not None for frame in stack.frames)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
