"""Hand over connections from a gateway to a service on the same host: the kernel passes the open socket (SCM_RIGHTS),
so the service reads the bytes and the address of the dialler directly, and no byte passes through the gateway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from whale_nebula.errors import ConfigError
from whale_nebula.security.files import lock_folder
from whale_nebula.transport.grpc.limits import normalize_address

LOGIN, DATA = "nebula-login/1", "nebula-data/1"
"""The purposes of connections, as TLS protocol names (ALPN)."""
NOUNS = {LOGIN: "logins", DATA: "data"}
COMMANDS = {LOGIN: "whale-nebula accounts serve", DATA: "whale-nebula data serve"}
_BACKLOG, _TIMEOUT_SECONDS, _PAUSE_SECONDS, _SOCKET_MODE = 128, 1.0, 0.1, 0o660
_LOG = logging.getLogger("whale_nebula.transport")

ConnectionHandler = Callable[[socket.socket, tuple[str, int]], None]


def socket_path(folder: Path, protocol: str, cluster: str) -> Path:
    """The socket of the service of a cluster in a folder that gateway and service share.

    >>> socket_path(Path("certs"), LOGIN, "gpu").as_posix()
    'certs/login-gpu.sock'
    """
    return folder / f"{protocol.removeprefix('nebula-').partition('/')[0]}-{cluster}.sock"


def hand_over(connection: socket.socket, path: Path) -> None:
    """Hand a connection over to the service at a path. Never blocks: an `OSError` means that no service accepts it."""
    with _shorten_path(path) as name, socket.socket(socket.AF_UNIX) as channel:
        channel.setblocking(False)
        channel.connect(name)
        socket.send_fds(channel, [b"\0"], [connection.fileno()])


@contextlib.contextmanager
def receive_connections(path: Path, handler: ConnectionHandler) -> Iterator[None]:
    """Pass each connection that is handed over at a path to `handler`, with the dialler's address, while the context is
    open. Members of the folder's group may hand over.
    """
    listening, stopping = _listen(path), threading.Event()
    thread = threading.Thread(target=_receive, args=(listening, handler, stopping), name="nebula-handed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join(2 * _TIMEOUT_SECONDS)
        listening.close()
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    if not path.parent.is_dir():
        raise ConfigError(
            "the folder does not exist",
            where=str(path.parent),
            mend="pass the same --services FOLDER as to the gateway",
        )
    listening = socket.socket(socket.AF_UNIX)
    try:
        with lock_folder(path.parent), _shorten_path(path) as name:
            if _is_taken(name):
                raise ConfigError(
                    "another service already listens on this socket",
                    where=str(path),
                    why="a gateway hands connections over to one service of each kind",
                    mend="stop the other service, or pass a different folder with --services",
                )
            path.unlink(missing_ok=True)
            listening.bind(name)
            path.chmod(_SOCKET_MODE)
            listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        why = error.strerror or str(error)
        raise ConfigError("cannot listen for connections from the gateway", where=str(path), why=why) from None
    except BaseException:
        listening.close()
        raise
    return listening


def is_served(path: Path) -> bool:
    """Whether a service accepts connections at a path."""
    with _shorten_path(path) as name:
        return _is_taken(name)


def _is_taken(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe_socket:
        probe_socket.setblocking(False)
        try:
            probe_socket.connect(name)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _shorten_path(path: Path) -> Iterator[str]:
    """A name of a path that is short enough for a socket: the kernel's limit is 107 bytes."""
    if len(os.fsencode(path)) < 108:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _receive(listening: socket.socket, handler: ConnectionHandler, stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            channel, _ = listening.accept()
        except OSError:  # closed, or no file descriptor available
            stopping.wait(_PAUSE_SECONDS)
            continue
        try:
            with channel:
                channel.settimeout(_TIMEOUT_SECONDS)
                _, files, *_ = socket.recv_fds(channel, 1, 1)
            for file in files:
                _pass_on(file, handler)
        except Exception:  # a failure of one connection must not affect others
            _LOG.exception("cannot accept a connection from the gateway")


def _pass_on(file: int, handler: ConnectionHandler) -> None:
    connection = socket.socket(fileno=file)
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            raise OSError("not a TCP connection")
        host, port, *_ = connection.getpeername()
    except OSError:  # or it has ended meanwhile
        connection.close()
        return
    handler(connection, (normalize_address(host), int(port)))
