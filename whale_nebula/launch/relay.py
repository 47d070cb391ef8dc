"""Forward the output of workers to the launcher's own, unchanged and in whole lines."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import threading
from collections.abc import Mapping
from typing import IO

from whale_nebula.launch.last_error import Kept
from whale_nebula.report.screen import Screen
from whale_nebula.security.diagnose import read_refusal

REST_SECONDS = 2.0
_TAIL = 4096
_LONGEST_LINE = 1 << 20
_BACK = b"\r\b"  # with these a bar goes to where its line begins, and would be written over the worker's name


_START_UP = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|[IWE]\d{4} .*(oneDNN custom operations are on|Could not find cuda drivers|cpu_feature_guard\.cc"
    rb"|failed call to cuInit)"
    rb"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags"
)


def is_start_up_line(line: bytes) -> bool:
    """Whether TensorFlow writes this line whenever it starts, whatever its log level is.

    >>> is_start_up_line(b"I0000 00:00:17.5 1 port.cc:153] oneDNN custom operations are on. You may see")
    True
    """
    return _START_UP.match(line) is not None


class Sink:
    """Where the lines of all workers go: an open file, written to by one of them at a time.

    When its reader has gone away what is written to it is dropped: training goes on, and no worker waits for it.
    Where it is a terminal on which something is drawn, that makes room.
    """

    def __init__(self, fd: int, screen: Screen | None = None) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._screen = screen

    def write(self, data: bytes) -> None:
        """Write all of it."""
        room = self._screen.room(ended=data.endswith(b"\n")) if self._screen else contextlib.nullcontext()
        with self._lock, contextlib.suppress(OSError), room:
            view = memoryview(data)
            while view:
                view = view[self._some(view) :]

    def _some(self, view: memoryview) -> int:
        try:
            return os.write(self._fd, view)
        except BlockingIOError:  # whoever shares this file with us has made it so
            select.select([], [self._fd], [])
            return 0


class Relay:
    """Two threads that hand on a process's output and errors until they end. The last of its errors are remembered.

    By what error of ours the process ends is kept back: whoever waits for it says so, last of all. Where gRPC writes
    why TLS did not come about, a line says it in our words, too: once for each reason.
    """

    def __init__(
        self, worker: str, process: subprocess.Popen[bytes], sinks: Mapping[str, Sink], prefixes: Mapping[str, str]
    ) -> None:
        self._prefixes = prefixes
        self._tail = b""
        self._worker = worker
        self._kept = Kept(worker)
        self._explained: set[str] = set()
        streams = {"out": process.stdout, "err": process.stderr}
        self._threads = [
            threading.Thread(
                target=self._pump, args=(name, stream, sinks[name]), name=f"nebula-{name}-{worker}", daemon=True
            )
            for name, stream in streams.items()
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> tuple[str, str]:
        """Nothing of the output is kept; of the errors the end. The process has ended; a stream that something it
        started still holds open is waited for only briefly.
        """
        for thread in self._threads:
            thread.join(REST_SECONDS)
        return "", self._tail.decode(errors="replace")

    def _pump(self, name: str, stream: IO[bytes], sink: Sink) -> None:
        prefix, started = self._prefixes.get(name, "").encode(), False
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                if name == "err" and (self._keeps(line) or is_start_up_line(line)):
                    continue
                sink.write(line if started else prefix + (line.lstrip(_BACK) if prefix else line))
                started = not line.endswith(b"\n")
                if name == "err" and not started:
                    self._explain(line, sink)
            if started and prefix:
                sink.write(b"\n")  # on a terminal the next line is another worker's

    def _keeps(self, line: bytes) -> bool:
        """Remember a line of the errors; whether that is all that is done with it."""
        self._tail = (self._tail + line)[-_TAIL:]
        return self._kept.back(line.decode(errors="replace"))

    def _explain(self, line: bytes, sink: Sink) -> None:
        meant = read_refusal(line.decode(errors="replace"))
        if meant is not None and meant not in self._explained:
            self._explained.add(meant)
            sink.write(f"whale-nebula: worker {self._worker}: {meant}\n".encode())
