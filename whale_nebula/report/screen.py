"""A part of the terminal that is drawn anew while everybody else goes on writing above it.

Whoever writes an unfinished line (Keras's progress bar, `print(end="")`) has the terminal to himself until he ends it:
what is drawn goes away at his first letter, and comes back after his last.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO

_UP_AND_CLEAR = "\x1b[1A\x1b[2K"


def terminal() -> TextIO | None:
    """The standard stream that is a terminal, if one is."""
    return next((stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()), None)


class Screen:
    """Draws at the end of a terminal. While it is open, `sys.stdout` and `sys.stderr` go through it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._height = 0
        self._ended = True
        self._beside: dict[str, _Beside] = {}

    def open(self) -> None:
        """Stand between the terminal and who writes to it."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._beside[name] = _Beside(self, stream)
                setattr(sys, name, self._beside[name])

    def draw(self, text: str) -> bool:
        """Draw some whole lines in place of those before; not while somebody's line is unfinished."""
        with self._lock:
            if not self._ended:
                return False
            self._erase()
            self._stream.write(text)
            self._stream.flush()
            self._height = text.count("\n")
            return True

    def write(self, stream: TextIO, text: str) -> int:
        """Somebody writes: what is drawn makes room."""
        with self._lock:
            if text:
                self._erase()
                self._ended = text.endswith("\n")
            return stream.write(text)

    def close(self) -> None:
        """Leave what is drawn, and give the streams back."""
        for name, beside in self._beside.items():
            if getattr(sys, name) is beside:
                setattr(sys, name, beside.stream)
        self._beside = {}

    def _erase(self) -> None:
        if self._height:
            self._stream.write(_UP_AND_CLEAR * self._height)
            self._stream.flush()
            self._height = 0


class _Beside:
    """A standard stream whose writes go through the screen; all else is the stream's own."""

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
