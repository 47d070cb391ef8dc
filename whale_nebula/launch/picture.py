"""Live displays of workers, sent to the launcher's terminal through a pipe; each frame replaces the last.

A worker writes to pipes and has no terminal; its launcher has one, on which the lines of all workers stand. So the
worker that tells of all clusters sends what it would draw, and the launcher draws it below those lines.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from whale_nebula.launch.job import Reader
from whale_nebula.launch.relay import REST_SECONDS
from whale_nebula.report.screen import Screen, size_of

_END = b"\0"
_CHUNK = 1 << 16


class Picture:
    """The worker's end: draws into the pipe `fd`, as large as the launcher's `terminal` is at that moment.

    It never waits. A picture that has not gone out whole goes on at the next, which is left out in its place.
    """

    def __init__(self, fd: int, terminal: int) -> None:
        for each in (fd, terminal):
            os.set_inheritable(each, False)
        os.set_blocking(fd, False)
        self._fd, self._terminal = fd, terminal
        self._left = b""
        self._drew = False

    def open(self) -> None:
        """There is nothing to make ready."""

    def size(self) -> os.terminal_size:
        """How large the launcher's terminal is."""
        return size_of(self._terminal)

    def draw(self, text: str) -> bool:
        """Draw some whole lines in place of those before; whether they went out, or began to."""
        fresh, self._drew = not self._left, True
        self._send(self._left or text.encode() + _END)
        return fresh

    def close(self) -> None:
        """Leave what this worker has drawn, if it drew at all: an empty picture says so."""
        if self._drew:
            self._send(self._left + _END)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                data = data[os.write(self._fd, data) :]
            except BrokenPipeError:  # nobody looks any more
                data = b""
        self._left = data


@dataclass(frozen=True)
class Board:
    """The launcher's terminal, and what draws on it."""

    fd: int
    screen: Screen


class Shown:
    """Draws on the launcher's screen what a worker sends, beside who reads what it writes."""

    def __init__(self, worker: str, reader: Reader, fd: int, screen: Screen) -> None:
        self._reader = reader
        self._screen = screen
        name = f"nebula-picture-{worker}"
        self._thread = threading.Thread(target=self._follow, args=(fd,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> tuple[str, str]:
        """The process has ended: what its reader kept."""
        self._thread.join(REST_SECONDS)
        return self._reader.close()

    def _follow(self, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as stream:
            for text in pictures(stream):
                if text:
                    self._screen.draw(text)
                else:
                    self._screen.leave()


def pictures(stream: IO[bytes]) -> Iterator[str]:
    r"""All whole pictures of a pipe, until its other end is closed; an empty one leaves what is drawn.

    >>> import io
    >>> list(pictures(io.BytesIO(b"a table\n\0the next\n\0\0half a")))
    ['a table\n', 'the next\n', '']
    """
    held = b""
    while chunk := stream.read(_CHUNK):
        *whole, held = (held + chunk).split(_END)
        yield from (each.decode(errors="replace") for each in whole)
