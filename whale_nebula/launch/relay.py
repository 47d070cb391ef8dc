"""What workers write, handed on as it comes: byte for byte, a whole line at a time."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import threading
from collections.abc import Mapping
from itertools import takewhile
from typing import IO

from whale_nebula.security.alerts import refused

REST_SECONDS = 2.0
_TAIL = 4096
_UNDER = re.compile(r"  (why|mend): |   {5,}")
_LONGEST_LINE = 1 << 20


class Sink:
    """Where the lines of all workers go: an open file, written to by one of them at a time.

    When its reader has gone away what is written to it is dropped: training goes on, and no worker waits for it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Write all of it."""
        with self._lock, contextlib.suppress(OSError):
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

    Where gRPC writes why TLS did not come about, a line says it in our words, too: once for each reason.
    """

    def __init__(
        self, worker: str, process: subprocess.Popen[bytes], sinks: Mapping[str, Sink], prefixes: Mapping[str, str]
    ) -> None:
        self._prefixes = prefixes
        self._tail = b""
        self._worker = worker
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
                if name == "err":
                    self._tail = (self._tail + line)[-_TAIL:]
                sink.write(line if started else prefix + line)
                started = not line.endswith(b"\n")
                if name == "err" and not started:
                    self._explain(line, sink)
            if started and prefix:
                sink.write(b"\n")  # on a terminal the next line is another worker's


    def _explain(self, line: bytes, sink: Sink) -> None:
        meant = refused(line.decode(errors="replace"))
        if meant is not None and meant not in self._explained:
            self._explained.add(meant)
            sink.write(f"whale-nebula: worker {self._worker}: {meant}\n".encode())


def last_sentence(errors: str) -> str:
    r"""The last word of a process and, where it has them, its reason and its mend: the lines that stand under it.

    >>> print(last_sentence("Traceback ...\nConfigError: NB-500 no\n  why: so\n       it is\n  mend: look\ngone\n"))
    NB-500 no
      why: so
           it is
      mend: look
    """
    word = last_word(errors)
    lines = errors.splitlines()
    at = max((number for number, line in enumerate(lines) if line.strip().endswith(word)), default=len(lines))
    return "\n".join([word, *takewhile(_UNDER.match, lines[at + 1 :])])


def last_word(errors: str) -> str:
    r"""The line in which a process most likely said why it ended: the last with an error's code, or the last there is.

    >>> last_word("Traceback ...\nwhale_nebula.errors.LinkClosedError: NB-401 worker 'npu/0' is gone\n  mend: look\n")
    "NB-401 worker 'npu/0' is gone"
    >>> last_word("Traceback ...\n  File x\nValueError: no\n\n"), last_word("")
    ('ValueError: no', '')
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    coded = [found[0] for line in lines if (found := re.search(r"NB-\d{3} .*", line))]
    return (coded or lines or [""])[-1]
