"""Forward the output and the drawings of worker processes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from whale_nebula.launch.job import Reader
from whale_nebula.launch.worker_exit import LastErrorFilter
from whale_nebula.report.screen import Screen, read_terminal_size
from whale_nebula.security.diagnose import read_refusal

REST_SECONDS = 2.0

Echo = Callable[[str, str, str], None]  # worker, "out" or "err", line


class Streams:
    """Two threads that read a process's standard output and standard error by `pump` until they end."""

    def __init__(self, worker: str, process: subprocess.Popen[bytes], pump: Callable[[str, IO[bytes]], None]) -> None:
        self._threads = [
            threading.Thread(target=pump, args=(name, stream), name=f"nebula-{name}-{worker}", daemon=True)
            for name, stream in (("out", process.stdout), ("err", process.stderr))
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Called when the process has ended. A stream that a descendant still holds open is waited for only briefly."""
        for thread in self._threads:
            thread.join(REST_SECONDS)


class CapturedOutput:
    """Retains the output of a process, and echoes it line by line."""

    def __init__(self, worker: str, process: subprocess.Popen[bytes], echo: Echo | None) -> None:
        self._worker, self._echo = worker, echo
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._streams = Streams(worker, process, self._pump)

    def close(self) -> tuple[str, str]:
        """Standard output and standard error."""
        self._streams.wait()
        return "".join(self._lines["out"]), "".join(self._lines["err"])

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._lines[name].append(text)
                if self._echo is not None:
                    self._echo(self._worker, name, text)


_TAIL = 4096
_LONGEST_LINE = 1 << 20
_BACK = b"\r\b"  # a progress bar returns to the start of its line with these, and would overwrite the worker's name


_START_UP = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|[IWE]\d{4} .*(oneDNN custom operations are on|Could not find cuda drivers|cpu_feature_guard\.cc"
    rb"|failed call to cuInit)"
    rb"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags"
)


def is_start_up_line(line: bytes) -> bool:
    """Whether TensorFlow writes this line at its start, at any log level.

    >>> is_start_up_line(b"I0000 00:00:17.5 1 port.cc:153] oneDNN custom operations are on. You may see")
    True
    """
    return _START_UP.match(line) is not None


class Sink:
    """Shared destination of all workers' lines: an open file with a lock.

    After its reader has closed it, output is dropped: training continues, and no worker blocks on it. On a terminal, a
    drawing is moved below the new lines.
    """

    def __init__(self, fd: int, screen: Screen | None = None) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._screen = screen

    def write(self, data: bytes) -> None:
        """Write all data."""
        room = self._screen.make_room(ended=data.endswith(b"\n")) if self._screen else contextlib.nullcontext()
        with self._lock, contextlib.suppress(OSError), room:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:  # another process that shares this file made it non-blocking
                    select.select([], [self._fd], [])


class Relay:
    """Forwards a process's standard output and standard error, and retains the end of the latter.

    The text of our error by which the process ends is held back: the supervisor prints it at the end of the run. If
    gRPC reports why a TLS handshake failed, an additional line explains it, once for each reason.
    """

    def __init__(
        self, worker: str, process: subprocess.Popen[bytes], sinks: Mapping[str, Sink], prefixes: Mapping[str, str]
    ) -> None:
        self._sinks, self._prefixes = sinks, prefixes
        self._tail = b""
        self._last_error = LastErrorFilter(worker)
        self._explained: set[str] = set()
        self._worker = worker
        self._streams = Streams(worker, process, self._pump)

    def close(self) -> tuple[str, str]:
        """Returns none of the output, and the end of the errors."""
        self._streams.wait()
        return "", self._tail.decode(errors="replace")

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        sink, prefix, started = self._sinks[name], self._prefixes.get(name, "").encode(), False
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                if name == "err":
                    self._tail = (self._tail + line)[-_TAIL:]
                    if self._last_error.holds_back(line.decode(errors="replace")) or is_start_up_line(line):
                        continue
                sink.write(line if started else prefix + (line.lstrip(_BACK) if prefix else line))
                started = not line.endswith(b"\n")
                if name == "err" and not started:
                    self._explain(line, sink)
            if started and prefix:
                sink.write(b"\n")  # on a terminal the next line may be another worker's

    def _explain(self, line: bytes, sink: Sink) -> None:
        reason = read_refusal(line.decode(errors="replace"))
        if reason is not None and reason not in self._explained:
            self._explained.add(reason)
            sink.write(f"whale-nebula: worker {self._worker}: {reason}\n".encode())


_END = b"\0"
_CHUNK = 1 << 16


class PictureWriter:
    """The worker's end: draws into the pipe `fd`, in the current size of the launcher's `terminal`.

    It never blocks. The rest of an incompletely written picture is written at the next call; the picture of that call
    is skipped.
    """

    def __init__(self, fd: int, terminal: int) -> None:
        for each in (fd, terminal):
            os.set_inheritable(each, False)
        os.set_blocking(fd, False)
        self._fd, self._terminal = fd, terminal
        self._unsent_text = b""
        self._drew = False

    def open(self) -> None:
        """No preparation is needed."""

    def size(self) -> os.terminal_size:
        """The size of the launcher's terminal."""
        return read_terminal_size(self._terminal)

    def draw(self, text: str) -> bool:
        """Replace the drawing by whole lines; returns whether they were sent at least in part."""
        fresh, self._drew = not self._unsent_text, True
        self._send(self._unsent_text or text.encode() + _END)
        return fresh

    def close(self) -> None:
        """Keep the drawing on the screen, by sending an empty picture, if anything was drawn."""
        if self._drew:
            self._send(self._unsent_text + _END)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                data = data[os.write(self._fd, data) :]
            except BrokenPipeError:  # the reader has ended
                data = b""
        self._unsent_text = data


@dataclass(frozen=True)
class TerminalScreen:
    """The descriptor of the launcher's terminal, and the screen that draws on it."""

    fd: int
    screen: Screen


class PictureReader:
    """A reader that also draws a worker's pictures on the launcher's screen."""

    def __init__(self, worker: str, reader: Reader, fd: int, screen: Screen) -> None:
        self._reader = reader
        self._screen = screen
        name = f"nebula-picture-{worker}"
        self._thread = threading.Thread(target=self._follow, args=(fd,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> tuple[str, str]:
        """Called when the process has ended: returns the output retained by the inner reader."""
        self._thread.join(REST_SECONDS)
        return self._reader.close()

    def _follow(self, fd: int) -> None:
        """Draw all complete pictures of a pipe until it is closed; an empty one freezes the drawing."""
        held = b""
        with os.fdopen(fd, "rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK):
                *whole, held = (held + chunk).split(_END)
                for picture in whole:
                    if picture:
                        self._screen.draw(picture.decode(errors="replace"))
                    else:
                        self._screen.keep_drawing()
