"""The addresses and free ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket

from whale_nebula.errors import ConfigError
from whale_nebula.launch.resolve.placement import ANY, Placement, host_of

_LOOPBACK = "127.0.0.1"


def is_local(host: str) -> bool:
    """Whether a host is this one: by its name, or because something can listen at its address. Asks no name server.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("192.0.2.1")
    (True, True, False)
    """
    own = socket.gethostname()
    if host in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return False
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.bind((host, 0))
        return True
    return False


def settle_ports(placement: Placement) -> Placement:
    """The placement with a free port for every address that has none yet, no two the same."""
    with contextlib.ExitStack() as held:
        found = {
            worker: f"{_LOOPBACK}:{_free(held)}" if address == ANY else address
            for worker, address in placement.addresses.items()
        }
    return Placement(placement.here, found)


def _free(held: contextlib.ExitStack) -> int:
    """A port that is free as long as the stack holds it, and most likely for a while after."""
    trial = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    trial.bind((_LOOPBACK, 0))
    return int(trial.getsockname()[1])


def listening(placement: Placement, *, written: bool = False) -> dict[str, str]:
    """Where each worker of this host listens: at its address, or, where no interface has it, at all there are.

    The second is how it is behind address translation, where others reach a host by an address that it does not have.
    A port that is taken is told now; a worker would say so after loading TensorFlow. So is a name that means nothing
    here, where somebody has `written` it; one that a platform gives may come to mean something within seconds.
    """
    return {worker: _listening(worker, placement.addresses[worker], written) for worker in placement.here}


def _listening(worker: str, address: str, written: bool) -> str:
    host, port = host_of(address), int(address.rpartition(":")[2])
    if written:
        _check_name(worker, address, host)
    problem = _try_to_listen(host, port)
    if problem == errno.EADDRNOTAVAIL:
        host = "::" if ":" in host else "0.0.0.0"  # noqa: S104 - who comes in is asked for a certificate
        address, problem = f"[::]:{port}" if host == "::" else f"{host}:{port}", _try_to_listen(host, port)
    if problem is None:
        return address
    raise ConfigError(
        f"worker {worker} cannot listen at {address}: {os.strerror(problem)}",
        why="another program listens there, or a worker of an earlier run" if problem == errno.EADDRINUSE else None,
        mend="end it, or give the worker another port in the config",
    )


def _check_name(worker: str, address: str, host: str) -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(
            f"worker {worker} cannot listen at {address}: {host!r} means nothing on this host",
            why=error.strerror,
            mend=f"write its number instead of {host} in the config, or mend /etc/hosts or the name server",
        ) from None


def _try_to_listen(host: str, port: int) -> int | None:
    """The error that keeps anybody from listening there; None where there is none, or where only a worker can know."""
    with contextlib.suppress(socket.gaierror):
        family, kind, _, _, end = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(end)
            except OSError as error:
                return error.errno
    return None
