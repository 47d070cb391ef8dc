"""Whether a worker whose stream has ended is dead, frozen, or about to come back: its gateway is near, and can look.

A worker that lives connects again within seconds. A port that refuses twice belongs to no process any more; one that
takes a connection and says nothing, or a host that does not answer, is frozen.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from whale_nebula.transport.grpc.probing import probe

State: TypeAlias = Literal["dead", "frozen"]
_PROMPT_SECONDS = 0.1  # in which a worker that lives has dialled again, as a rule
_BETWEEN_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
_LOOKS = 20
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def look(address: str, *, secure: bool, seconds: float = _ANSWER_SECONDS) -> str:
    """What stands at an address: "refused", "silent" or "open"; "unknown" tells nothing.

    A frozen process is still connected to, by its kernel. So something is said that a live one answers.
    """
    found = probe(address, seconds).found
    return _spoken_to(address, secure, seconds) if found == "open" else found


def _spoken_to(address: str, secure: bool, seconds: float) -> str:
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)) as line:
            line.settimeout(seconds)
            if secure:
                line = _unproven().wrap_socket(line)
            else:
                line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            line.recv(1)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silent"
    except OSError:  # it has closed the line, which it can only do alive
        return "open"
    return "open"


def _unproven() -> ssl.SSLContext:
    """For a handshake that only asks whether anybody answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class Vigil:
    """Looks for workers of this cluster that went, one thread for each, and tells what has become of them.

    `back` says whether a worker has connected again; `told(worker, state, why)` is called once it is known to be dead
    or frozen. What is found at an address counts only if it was open before: one behind a wall refuses everybody.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        back: Callable[[str], bool],
        told: Callable[[str, State, str], None],
        *,
        secure: bool,
        look: Callable[..., str] = look,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._addresses, self._back, self._told, self._secure = addresses, back, told, secure
        self._look, self._rest = look, rest
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._looking: set[str] = set()

    def greet(self, worker: str) -> None:
        """A worker is connected: see, in another thread, whether its port can be looked at from here."""
        if worker in self._addresses and worker not in self._open:
            self._start(worker, self._first)

    def begin(self, worker: str) -> None:
        """A worker's stream has ended."""
        if worker in self._open:
            self._start(worker, self._keep)

    def _start(self, worker: str, run: Callable[[str], None]) -> None:
        with self._lock:
            if worker in self._looking:
                return
            self._looking.add(worker)

        def thread() -> None:
            try:
                run(worker)
            finally:
                with self._lock:
                    self._looking.discard(worker)

        threading.Thread(target=thread, name=f"nebula-vigil-{worker}", daemon=True).start()

    def _first(self, worker: str) -> None:
        if probe(self._addresses[worker], _ANSWER_SECONDS).found == "open":
            self._open.add(worker)
        if not self._back(worker):
            self._keep(worker)

    def _keep(self, worker: str) -> None:
        self._rest(_PROMPT_SECONDS)
        seen: list[str] = []
        while len(seen) < _LOOKS and worker in self._open and not self._back(worker):
            seen.append(self._look(self._addresses[worker], secure=self._secure))
            state = verdict(seen)
            if state is not None and not self._back(worker):
                self._open.discard(worker)
                where = self._addresses[worker]
                self._told(worker, state, f"its stream has ended, and {where} {_HOW[state]}")
                return
            self._rest(_BETWEEN_SECONDS)


_HOW: dict[State, str] = {
    "dead": "has refused twice: no process has the port any more",
    "frozen": "does not answer: its process or its host stands still",
}


def verdict(seen: list[str]) -> State | None:
    """What the last two looks say, if they agree.

    >>> verdict(["refused"]), verdict(["open", "refused", "refused"]), verdict(["silent", "silent"])
    (None, 'dead', 'frozen')
    """
    last = seen[-2:]
    if last == ["refused", "refused"]:
        return "dead"
    return "frozen" if last == ["silent", "silent"] else None
