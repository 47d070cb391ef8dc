"""Worker processes on this machine: start one, and read its output."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from whale_nebula.launch.identity import VARIABLE, Identity

_REST_SECONDS = 2.0

Echo = Callable[[str, str, str], None]  # worker, "out" or "err", line


class Output:
    """Two threads that read a process's standard output and standard error until they end."""

    def __init__(self, worker: str, process: subprocess.Popen[bytes], echo: Echo | None) -> None:
        self._worker = worker
        self._echo = echo
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        streams = {"out": process.stdout, "err": process.stderr}
        self._threads = [
            threading.Thread(target=self._pump, args=(name, stream), name=f"nebula-{name}-{worker}", daemon=True)
            for name, stream in streams.items()
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> tuple[str, str]:
        """Standard output and standard error. The process has ended; a stream that something it started still
        holds open is waited for only briefly.
        """
        for thread in self._threads:
            thread.join(_REST_SECONDS)
        return "".join(self._lines["out"]), "".join(self._lines["err"])

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._lines[name].append(text)
                if self._echo is not None:
                    self._echo(self._worker, name, text)


def start(
    argv: Sequence[str],
    identity: Identity,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[bytes]:
    """A new process, no fork of this one's memory, in a group of its own, so that it can be killed whole."""
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, **(env or {}), VARIABLE: identity.to_json()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=identity.descriptors,
        process_group=0,
    )


def abandon(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Some process could not be started: take the others back."""
    for process in processes.values():
        process.kill()
        process.communicate()
