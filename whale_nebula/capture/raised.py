"""An error that a trace brought out: what was said, who raised it, and at which line of the user's."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import keras
import tensorflow as tf

from whale_nebula.capture.places import foreign
from whale_nebula.site import script_site

_REWRITTEN = "__autograph_generated_file"
"""How the files begin that hold AutoGraph's copies of the user's functions."""
_RETOLD = "in user code:"
"""How AutoGraph's own account of an error begins."""

Place = tuple[str, int]


@dataclass(frozen=True)
class Raised:
    """An error as it left a trace."""

    error: Exception

    @cached_property
    def chain(self) -> tuple[BaseException, ...]:
        """The error and those that it was made of, the last first."""
        found: list[BaseException] = []
        error: BaseException | None = self.error
        while error is not None and error not in found:
            found.append(error)
            error = error.__cause__ or error.__context__
        return tuple(found)

    @cached_property
    def origin(self) -> BaseException:
        """The error before AutoGraph told it again."""
        return next((each for each in self.chain if not str(each).lstrip().startswith(_RETOLD)), self.error)

    @cached_property
    def text(self) -> str:
        """All that was said."""
        return str(self.origin).strip()

    @cached_property
    def sentence(self) -> str:
        """What was said, in a line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return (lines or [type(self.origin).__name__])[0][:400]

    @cached_property
    def place(self) -> Place | None:
        """The innermost line of the user's that led to it."""
        told = [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', str(self.error))]
        for places in [*map(_frames, self.chain), told]:
            for file, line in reversed(places):
                if not foreign(file) and not _rewritten(file):
                    return (file, line) if places is told or not told else told[-1]
        return None

    @property
    def line(self) -> str:
        """Where: 'file.py:12'; what no line of the user's is part of is blamed on the line that called for the step."""
        return str(script_site()) if self.place is None else f"{self.place[0]}:{self.place[1]}"

    @property
    def source(self) -> str:
        """What the user wrote there."""
        return "" if self.place is None else linecache.getline(*self.place).strip()

    @cached_property
    def deliberate(self) -> bool:
        """Whether the user's own code raised it: no library was asked anything there."""
        places = _frames(self.origin)
        return bool(places) and (_rewritten(places[-1][0]) or not foreign(places[-1][0]))

    def shortened(self) -> Exception:
        """The error without the frames of libraries between the user's."""
        return self.error.with_traceback(_short(self.error.__traceback__))


def _frames(error: BaseException) -> list[Place]:
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def _rewritten(file: str) -> bool:
    return os.path.basename(file).startswith(_REWRITTEN)


def _short(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if not foreign(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return kept


@contextlib.contextmanager
def unfiltered() -> Iterator[None]:
    """Let errors of this thread keep all their frames for a while: they say whose code raised them."""
    ours = (tf.debugging.is_traceback_filtering_enabled(), keras.config.is_traceback_filtering_enabled())
    tf.debugging.disable_traceback_filtering()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if ours[0]:
            tf.debugging.enable_traceback_filtering()
        if ours[1]:
            keras.config.enable_traceback_filtering()
