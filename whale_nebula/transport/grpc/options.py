"""Options of gRPC channels and servers, each chosen by measurement.

No static window is set: that would disable the bandwidth probe, and a window that is right for one link is too small
for another.
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import grpc

from whale_nebula.config.place import split_address
from whale_nebula.security import Credentials, CurrentCredentials
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.wire.frame import FRAME_CAP

Options = list[tuple[str, int | str]]

HANDSHAKES = 512  # the most simultaneous connections without an accepted stream; see `limits`
LANES_WITHOUT_BBR = 4
_OTHER_FILES = 128  # that a process needs for itself
_HANDSHAKE_SECONDS = 5.0
_IDLE_SECONDS = 10.0  # a connection without a stream is closed
_STREAMS = 4  # of one connection; ours use one each
_LENIENT = 4.0
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def make_client_options(deadlines: Deadlines, rate: float | None = None, *, name: str | None = None) -> Options:
    """Options of a client channel that has its own connection; `name` is the name expected in the server's
    certificate.
    """
    options: Options = [
        *_make_options(deadlines.keepalive, deadlines.find_ping_timeout(rate)),
        ("grpc.use_local_subchannel_pool", 1),  # otherwise channels to one address share a connection
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    return [*options, ("grpc.ssl_target_name_override", name)] if name else options


def make_server_options(deadlines: Deadlines, connections: int) -> Options:
    """The options of a server for a number of connections. It accepts `HANDSHAKES` more that are not authenticated yet,
    but at most half of the files that this process may open. The age of a connection is not limited: the peers of its
    streams are verified again once a second.

    The server is slow to give up a connection. The dialling side detects a dead connection first, and its next
    connection replaces it; so a slow link, which the server cannot distinguish from a dead one, is kept.
    """
    return [
        *_make_options(deadlines.silence, _LENIENT * deadlines.silence),
        ("grpc.so_reuseport", 0),  # a second process that binds the port must fail, not share it
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", _to_milliseconds(_HANDSHAKE_SECONDS)),
        ("grpc.max_allowed_incoming_connections", find_max_connections(connections)),
        ("grpc.max_connection_idle_ms", _to_milliseconds(_IDLE_SECONDS)),
        ("grpc.max_concurrent_streams", _STREAMS),
    ]


def find_max_connections(connections: int, files_each: int = 1) -> int:
    """The limit of connections at a port that is to serve `connections` authenticated ones, where each needs
    `files_each` open files.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return connections + HANDSHAKES
    possible = max(files - _OTHER_FILES, files // 2) // files_each
    return min(connections + min(HANDSHAKES, files // 2), possible)


def count_lanes(control: str | None = None) -> int:
    """The number of connections over which frames are spread: one if the kernel uses BBR, several if packet loss would
    halve the rate of one.

    >>> count_lanes("bbr"), count_lanes("reno")
    (1, 4)
    """
    control = read_congestion_control() if control is None else control
    return 1 if control.startswith("bbr") else LANES_WITHOUT_BBR


def read_congestion_control() -> str:
    """The congestion control of this host's TCP; "" if unknown."""
    try:
        return _CONTROL.read_text().strip()
    except OSError:
        return ""


def _make_options(keepalive: float, answer: float) -> Options:
    """The options of both sides; `answer` is the timeout of a ping."""
    return [
        ("grpc.max_send_message_length", FRAME_CAP),
        ("grpc.max_receive_message_length", FRAME_CAP),
        ("grpc.http2.bdp_probe", 1),
        ("grpc.keepalive_time_ms", _to_milliseconds(keepalive)),
        ("grpc.keepalive_timeout_ms", _to_milliseconds(answer)),
        ("grpc.http2.ping_timeout_ms", _to_milliseconds(answer)),  # without it a frozen peer is undetected for a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _to_milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def make_server_credentials(current: CurrentCredentials) -> Any:
    """TLS credentials of a listener: clients must present a certificate; each handshake uses the current one."""
    used = current()

    def fetch() -> Any:
        nonlocal used
        current_credentials = current()
        if current_credentials is used:
            return None
        used = current_credentials
        return _make_configuration(current_credentials)

    return grpc.dynamic_ssl_server_credentials(_make_configuration(used), fetch, require_client_authentication=True)


def _make_configuration(credentials: Credentials) -> Any:
    pair = (credentials.key_pem, credentials.cert_pem)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=credentials.ca_pem)


def make_channel_credentials(credentials: Credentials) -> Any:
    """TLS credentials of one channel, which uses them until it is closed."""
    return grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)


Outcome: TypeAlias = Literal["open", "refused", "silent", "unknown"]


REFUSALS_OF_DEAD_PROCESS = 2
"""A process whose port refuses so many connections in a row no longer exists: one that restarts refuses one."""
REFUSED_TWICE = "refused twice: no process listens on the port"


class Probe(NamedTuple):
    """Result of probing an address. `unknown`: its name does not resolve, or it is not routable."""

    outcome: Outcome
    why: str


def probe_address(address: str, seconds: float) -> Probe:
    """Connect to an address once, and disconnect immediately."""
    try:
        socket.create_connection(split_address(address), timeout=seconds).close()
    except ConnectionRefusedError:
        return Probe("refused", f"no process listens at {address}")
    except TimeoutError:
        return Probe("silent", f"{address} does not answer")
    except OSError as error:
        return Probe("unknown", f"{address}: {error.strerror or error}")
    return Probe("open", "")
