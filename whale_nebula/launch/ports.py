"""Free TCP ports, each of which is given to one process of a host at a time."""

from __future__ import annotations

import atexit
import contextlib
import errno
import secrets
import socket
from collections.abc import Iterator

from whale_nebula.errors import ConfigError

_FIRST, _COUNT = 10_000, 20_000  # below the ephemeral ports of outgoing connections
_TRIES = 1_000
_HELD: dict[int, socket.socket] = {}
_HELD_AT_MOST = 128


@atexit.register
def _release_all() -> None:
    for port in list(_HELD):
        _release(port)


def free_port() -> int:
    """A free port of this host: no process listens at it, no outgoing connection takes it, and it is given out once.

    This process holds the UDP port of the same number until it has requested many more: so other callers of this
    function see that the port is reserved, though no process listens at it yet.
    """
    for _ in range(_TRIES):
        port = _FIRST + secrets.randbelow(_COUNT)
        sign = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if _can_bind(sign, "127.0.0.1", port) and _is_free(port):
            _HELD[port] = sign
            if len(_HELD) > _HELD_AT_MOST:
                _release(next(iter(_HELD)))
            return port
        sign.close()
    raise ConfigError("this machine has no free port", mend="end what listens at so many")


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Reserve free ports until they are released."""
    ports = [free_port() for _ in range(count)]
    try:
        yield ports
    finally:
        for port in ports:
            _release(port)


def _release(port: int) -> None:
    if (sign := _HELD.pop(port, None)) is not None:
        sign.close()


def _is_free(port: int) -> bool:
    """Whether the port can be bound on all addresses of this host, in each address family that it has."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - nothing listens
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if not _can_bind(trial, address, port):
                return False
    return True


def _can_bind(trial: socket.socket, address: str, port: int) -> bool:
    try:
        trial.bind((address, port))
    except OSError as error:
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True
