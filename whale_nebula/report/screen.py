"""A region of the terminal that is redrawn below the output of everything else.

While a line of other output is unfinished (Keras's progress bar, `print(end="")`) the drawing is removed; it is drawn
again once that line ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

_UP_AND_CLEAR = "\x1b[1A\x1b[2K"
_DEFAULT_SIZE = os.terminal_size((80, 24))


def find_terminal() -> TextIO | None:
    """The standard stream that is a terminal, if any."""
    return next((stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()), None)


class Canvas(Protocol):
    """An area for repeated drawing: a terminal, or a connection to one."""

    def open(self) -> None:
        """Prepare for drawing."""

    def size(self) -> os.terminal_size:
        """The current number of columns and lines."""

    def draw(self, text: str) -> bool:
        """Replace the drawing by whole lines; returns whether it succeeded."""

    def close(self) -> None:
        """Keep the drawing on the screen."""


class Screen:
    """A drawing at the end of a terminal. While it is open, `sys.stdout` and `sys.stderr` go through it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._height = 0
        self._is_line_ended = True
        self._waiting: str | None = None  # the last drawing, deferred until another writer's line ends
        self._keeps_drawing = False  # whether that drawing is kept
        self._proxies: dict[str, _StreamProxy] = {}

    def open(self) -> None:
        """Intercept the terminal's standard streams."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._proxies[name] = _StreamProxy(self, stream)
                setattr(sys, name, self._proxies[name])

    def size(self) -> os.terminal_size:
        """The current size of the terminal; the variables COLUMNS and LINES override it."""
        with contextlib.suppress(OSError, ValueError):
            return read_terminal_size(self._stream.fileno())
        return read_terminal_size(None)

    def draw(self, text: str) -> bool:
        """Replace the drawing by whole lines; deferred while another writer's line is unfinished."""
        with self._lock:
            if not self._is_line_ended:
                self._waiting, self._keeps_drawing = text, False
                return False
            self._waiting = None
            self._erase()
            self._stream.write(text)
            self._stream.flush()
            self._height = text.count("\n")
            return True

    def write(self, stream: TextIO, text: str) -> int:
        """Write another writer's output, above the drawing."""
        if not text:
            return stream.write(text)
        with self.make_room(ended=text.endswith("\n")):
            return stream.write(text)

    @contextlib.contextmanager
    def make_room(self, *, ended: bool) -> Iterator[None]:
        """Context in which other output is written, without the drawing; `ended` is whether it ends with a newline."""
        with self._lock:
            self._erase()
            self._is_line_ended = ended
            yield
            if ended and self._waiting is not None:
                self.draw(self._waiting)
                if self._keeps_drawing:
                    self.keep_drawing()

    def keep_drawing(self) -> None:
        """Leave the drawing on the screen; later output is below it. A deferred drawing is left once it is drawn."""
        with self._lock:
            self._height, self._keeps_drawing = 0, True

    def close(self) -> None:
        """Leave the drawing on the screen, and restore the streams."""
        self.keep_drawing()
        for name, proxy in self._proxies.items():
            if getattr(sys, name) is proxy:
                setattr(sys, name, proxy.stream)
        self._proxies = {}

    def _erase(self) -> None:
        if self._height:
            self._stream.write(_UP_AND_CLEAR * self._height)
            self._stream.flush()
            self._height = 0


def read_terminal_size(fd: int | None) -> os.terminal_size:
    """The current size of a terminal, or 80 x 24 if it is unknown; COLUMNS and LINES override it."""
    actual = _DEFAULT_SIZE
    with contextlib.suppress(OSError):
        actual = _DEFAULT_SIZE if fd is None else os.get_terminal_size(fd)
    variables = (os.environ.get("COLUMNS", ""), os.environ.get("LINES", ""))
    sizes = zip(variables, actual, _DEFAULT_SIZE, strict=True)
    return os.terminal_size(int(word) if word.isdecimal() else size or default for word, size, default in sizes)


class _StreamProxy:
    """A standard stream whose writes go through the screen; everything else is delegated."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self.stream = stream
        self._screen = screen

    def write(self, text: str) -> int:
        return self._screen.write(self.stream, text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
