"""Requests to a launcher: by HTTP at a local control socket, or by a file that it watches.

`curl --unix-socket PATH http://run/status`, and there `/metrics`, `-X POST .../resize?npu=1`, `-X POST .../preempt`.
The socket is a file that only this user may open; no network port is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from whale_nebula.errors import ConfigError, NebulaError, OptionError
from whale_nebula.report.prometheus import Handler, serve_in_thread

Answer = Mapping[str, Any] | str
Action = Callable[[Mapping[str, str]], Answer]
"""Handler of a request with these parameters; returns the answer, as JSON or as text."""


PREEMPT = "preempt"
_LOOK_SECONDS = 0.5


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    get: Mapping[str, Action]
    post: Mapping[str, Action]


class _Handler(Handler):
    server: _Server

    def do_GET(self) -> None:
        """Answer a query of the state."""
        self._answer(self.server.get)

    def do_POST(self) -> None:
        """Execute a command."""
        self._answer(self.server.post)

    def _answer(self, actions: Mapping[str, Action]) -> None:
        request = urlsplit(self.path)
        action = actions.get(request.path)
        if action is None:
            known = [*(f"GET {path}" for path in self.server.get), *(f"POST {path}" for path in self.server.post)]
            self._send(404, {"error": f"unknown request; available: {', '.join(known)}"})
            return
        try:
            self._send(200, action(dict(parse_qsl(request.query))))
        except NebulaError as error:
            self._send(400, {"error": str(error)})

    def _send(self, code: int, answer: Answer) -> None:
        if isinstance(answer, str):
            self.send(code, "text/plain; charset=utf-8", answer)
        else:
            self.send(code, "application/json", json.dumps(answer) + "\n")

    def address_string(self) -> str:
        """A Unix socket has no address."""
        return "local"


@contextlib.contextmanager
def serve_control_socket(path: str, get: Mapping[str, Action], post: Mapping[str, Action]) -> Iterator[None]:
    """Answer requests at a socket file while the context is open; the file is removed at its end. An earlier socket is
    replaced, but no other file.
    """
    if Path(path).is_socket():
        os.unlink(path)
    before = os.umask(0o177)
    try:
        server = _Server(path, _Handler)
    except OSError as error:
        raise ConfigError(
            "cannot open the control socket", where=path, why=error.strerror, mend="--control run.sock"
        ) from None
    finally:
        os.umask(before)
    server.get, server.post = get, post
    try:
        with serve_in_thread(server, "nebula-control"):
            yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def watch_notices(path: str, handle: Callable[[str], None], seconds: float = _LOOK_SECONDS) -> Iterator[None]:
    """Call `handle` with the content of a file each time that it has changed while the context is open, unless it is
    empty or missing. What is in the file at the start is an old notice. A file that is being written is read once it
    no longer changes.
    """
    stop = threading.Event()

    def watch(handled: str) -> None:
        before = handled
        while not stop.wait(seconds):
            found = _read_notice(path)
            if found == before != handled:
                handled = found
                if found:
                    handle(found)
            before = found

    thread = threading.Thread(target=watch, args=[_read_notice(path)], name="nebula-notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _read_notice(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def parse_notice(text: str) -> dict[str, int]:
    """The numbers of workers that a notice asks for; none if all are to leave.

    >>> parse_notice("npu=1 gpu=2"), parse_notice("preempt")
    ({'npu': 1, 'gpu': 2}, {})
    """
    if text == PREEMPT:
        return {}
    words = (word.partition("=") for word in text.split())
    return _parse_pairs(
        [(cluster, count) for cluster, _, count in words],
        OptionError(
            f"{text!r} is not a valid notice",
            why="it asks all workers to leave, or for numbers of workers by cluster",
            mend="write preempt, or npu=1",
        ),
    )


def parse_counts(texts: Mapping[str, str]) -> dict[str, int]:
    """The numbers of workers in a request: `npu=1&gpu=2`."""
    error = OptionError("resize needs clusters and their numbers of workers", mend="POST /resize?npu=1")
    return _parse_pairs(list(texts.items()), error)


def _parse_pairs(pairs: Sequence[tuple[str, str]], error: OptionError) -> dict[str, int]:
    """The numbers of workers by cluster, of which there is at least one; raises the error otherwise."""
    if not pairs or not all(count.isdecimal() for _, count in pairs):
        raise error
    return {cluster: int(count) for cluster, count in pairs}
