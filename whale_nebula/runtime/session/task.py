"""The worker as a TensorFlow task: its device, its index in the cluster, and its server, which is restricted to the
cluster's own addresses.

A launched process does this as soon as Keras is loaded, before a script computes. This module does not import Keras:
the first of our modules to do so would be partially loaded when `prepare` is called.

TensorFlow's own server is unauthenticated: it listens on every address of a machine and executes any request. It cannot
be restricted to one address, so a kernel filter drops packets to its port from elsewhere, and connections made between
the server's start and the filter are closed. This needs no privileges on Linux. If it is not possible, no connection is
refused, and the caller is informed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import Attachment
from whale_nebula.launch.placement import free_port
from whale_nebula.tf import collectives as tf_collectives

_LOAD_BYTE, _LOAD_WORD, _AND, _EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000
_SO_ATTACH_FILTER = 26
_ACCEPT, _DROP = 0xFFFFFFFF, 0
_LOOPBACK_4, _LOOPBACK_6 = "127.0.0.0/8", "::1/128"

_log = logging.getLogger("whale_nebula.runtime.session.task")

_ACCEPT_SECONDS = 1.0
_TCP_INFO_BYTES = 28  # of struct tcp_info, up to and including tcpi_unacked

Rule = tuple[int, int, int, int]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def restrict_connections(port: int, hosts: Sequence[str]) -> bool:
    """Allow only this machine and `hosts` (numeric addresses) to connect to a port that this process listens on.
    Connections that others have made before are closed.

    Returns whether the port is restricted, which not every system supports, nor every address: a name is not enough.
    """
    try:
        networks = [ipaddress.ip_network(each) for each in dict.fromkeys([_LOOPBACK_4, _LOOPBACK_6, *hosts])]
    except ValueError:  # a name is not an address
        return False
    packed = b"".join(struct.pack("=HBBI", *rule) for rule in build_filter(networks))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("@HP", len(packed) // 8, ctypes.addressof(buffer))
    found = 0
    try:
        for listener in _list_sockets(port):
            if _is_listening(listener):
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                _wait_accepted(listener)
                found += 1
    except OSError:  # another system, or a kernel that accepts no filter
        return False
    _close_foreign_connections(port, networks)
    return found > 0


def _wait_accepted(listener: socket.socket) -> None:
    """Wait until the server has accepted the connections made before the filter; no others can be made."""
    limit = time.monotonic() + _ACCEPT_SECONDS
    while _count_queued(listener) and time.monotonic() < limit:
        time.sleep(0.001)


def _count_queued(listener: socket.socket) -> int:
    """The number of a listener's connections that are not accepted yet, from a field of TCP_INFO that counts segments
    for other sockets.
    """
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=I", info, _TCP_INFO_BYTES - 4)[0])


def _close_foreign_connections(port: int, networks: Sequence[Network]) -> None:
    """Close the connections to a port of this process from outside these networks."""
    for each in _list_sockets(port):
        with contextlib.suppress(OSError):  # a listener, or closed meanwhile
            peer = ipaddress.ip_address(each.getpeername()[0].partition("%")[0])
            peer = getattr(peer, "ipv4_mapped", None) or peer
            if not any(peer in network for network in networks):
                each.shutdown(socket.SHUT_RDWR)


def restrict_port(port: int, hosts: Sequence[str]) -> None:
    """Restrict a port to this machine and `hosts`, or warn that it is open."""
    if not restrict_connections(port, hosts):
        _log.warning(
            "the TensorFlow server of this worker listens on port %d for all hosts, without authentication: use a "
            "firewall to admit only the workers of this cluster",
            port,
        )


def build_filter(networks: Sequence[Network]) -> list[Rule]:
    """The program for the kernel's packet filter that accepts packets from these networks and drops all others."""
    version = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_AND, 0, 0, 0xF0)]
    parts = [[*version, *_match_network(network)] for network in networks]
    return [*(rule for part in parts for rule in part), (_RETURN, 0, 0, _DROP)]


def _match_network(network: Network) -> list[Rule]:
    """Filter code that accepts packets of one network, and otherwise continues."""
    source = 12 if network.version == 4 else 8
    words = zip(_words(network.network_address), _words(network.netmask), strict=True)
    tests: list[Rule] = []
    for number, (wanted, mask) in enumerate(words):
        tests += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + source + 4 * number), (_AND, 0, 0, mask)]
        tests.append((_EQUAL, 0, 0, wanted))
    steps = [(_EQUAL, 0, 0, network.version << 4), *tests, (_RETURN, 0, 0, _ACCEPT)]
    end = len(steps)
    return [(code, 0, end - at - 1 if code == _EQUAL else 0, k) for at, (code, _, _, k) in enumerate(steps)]


def _words(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, ...]:
    return struct.unpack(f"!{len(address.packed) // 4}I", address.packed)


def _list_sockets(port: int) -> Iterator[socket.socket]:
    """Duplicates of the sockets of this process that listen on a port or have accepted a connection there, each open
    until the next one.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the folder's own descriptor is by now
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if _is_tcp(found) and found.getsockname()[1] == port:
                        yield found


def _is_tcp(found: socket.socket) -> bool:
    return found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM


def _is_listening(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def find_local_address(host: str) -> str:
    """The local address of connections to another host, found without sending anything.

    >>> find_local_address("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as trial:
        trial.connect(address)
        return str(trial.getsockname()[0])


# ---------------------------------------------------------------------- the device and the task
def select_device(device: str, worker: str) -> None:
    """Make only the CPU, or one GPU in addition, visible to this process. TensorFlow must not be initialised yet.

    >>> select_device("CPU", "gpu/0")
    """
    gpus = tf.config.list_physical_devices("GPU")
    kind, _, number = device.partition(":")
    if kind == "GPU" and int(number) >= len(gpus):
        raise ConfigError(
            f"worker {worker} needs {device}, but TensorFlow finds {len(gpus) or 'no'} GPU{'s' * (len(gpus) > 1)}",
            where=f"device: of {worker} in the config",
            why="each worker of a host uses one of its GPUs, which are numbered from 0",
            mend='device: CPU, or install TensorFlow with GPU support on that host: pip install "tensorflow[and-cuda]"',
        )
    try:
        tf.config.set_visible_devices([gpus[int(number)]] if kind == "GPU" else [], "GPU")
    except RuntimeError as begun:
        raise ConfigError(
            f"worker {worker} cannot use {device}: TensorFlow has already started",
            why=str(begun),
            mend="import keras before any computation, so that the device of the worker is set in time",
        ) from None


_UNKNOWN_ADDRESS = "127.0.0.1:1"  # the address of a mate that is not yet known


def prepare(attachment: Attachment) -> None:
    """Select the worker's device, if the config names one, and prepare its task."""
    if attachment.device is not None:
        select_device(attachment.device, attachment.worker)
    prepare_task(attachment)


def prepare_task(attachment: Attachment) -> None:
    """Configure a worker with mates in its cluster as their task, before TensorFlow's runtime starts.

    It does not start the runtime: a script may still set threads and devices. Tensors that it creates remain valid when
    the collectives are opened. Until then, only this machine can connect to the port. If the runtime has already
    started, nothing is done, and the collectives cannot be opened.
    """
    workers = list_tasks(attachment)
    if len(workers) < 2 or tf_collectives.find_task() is not None:
        return
    index, port = workers.index(attachment.worker), free_port()
    addresses = [f"127.0.0.1:{port}" if number == index else _UNKNOWN_ADDRESS for number in range(len(workers))]
    tf_collectives.prepare_task(index, addresses, functools.partial(restrict_port, port, ()))


def list_tasks(attachment: Attachment) -> list[str]:
    """The workers of this worker's cluster, in the order of tasks."""
    mates = [worker for worker, cluster in attachment.peers.items() if cluster == attachment.cluster]
    return sorted([attachment.worker, *mates])
