"""The launcher's local socket: who may open it asks there by HTTP how the run is, or for other workers.

`curl --unix-socket PATH http://run/status`, and there `/metrics`, `-X POST .../resize?npu=1`, `-X POST .../preempt`.
The socket is a file that only this user may open; nothing listens on a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from whale_nebula.errors import ConfigError, NebulaError, OptionError

Answer = Mapping[str, Any] | str
Action = Callable[[Mapping[str, str]], Answer]
"""What is done for a request with these parameters; gives what is answered, as JSON or as a text."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    get: Mapping[str, Action]
    post: Mapping[str, Action]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "whale-nebula", ""

    def do_GET(self) -> None:
        """Answer what the state is."""
        self._answer(self.server.get)

    def do_POST(self) -> None:
        """Do something."""
        self._answer(self.server.post)

    def _answer(self, actions: Mapping[str, Action]) -> None:
        asked = urlsplit(self.path)
        action = actions.get(asked.path)
        if action is None:
            known = [*(f"GET {path}" for path in self.server.get), *(f"POST {path}" for path in self.server.post)]
            self._send(404, {"error": f"there is {', '.join(known)}"})
            return
        try:
            self._send(200, action(dict(parse_qsl(asked.query))))
        except NebulaError as error:
            self._send(400, {"error": str(error)})

    def _send(self, code: int, answer: Answer) -> None:
        text = isinstance(answer, str)
        content = (answer if isinstance(answer, str) else json.dumps(answer) + "\n").encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; charset=utf-8" if text else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        """A Unix socket has no address."""
        return "local"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base class has it
        """Say nothing: who asks gets the answer."""


@contextlib.contextmanager
def listen_locally(path: str, get: Mapping[str, Action], post: Mapping[str, Action]) -> Iterator[None]:
    """Answer requests at a socket file while this is open; the file is removed in the end."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o177)
    try:
        server = _Server(path, _Handler)
    except OSError as error:
        raise ConfigError(
            "the launcher's socket cannot be opened", where=path, why=error.strerror, mend="--control run.sock"
        ) from None
    finally:
        os.umask(before)
    server.get, server.post = get, post
    thread = threading.Thread(target=server.serve_forever, name="nebula-control", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def read_sizes(given: Mapping[str, str]) -> dict[str, int]:
    """The numbers of workers in a request: `npu=1&gpu=2`."""
    if not given or not all(count.isdecimal() for count in given.values()):
        raise OptionError("resize takes clusters and their numbers of workers", mend="POST /resize?npu=1")
    return {cluster: int(count) for cluster, count in given.items()}
