"""The placement of a run's workers, the result of a resolver; and free TCP ports, each given out once."""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.config import Cluster, Config
from whale_nebula.config.place import split_address
from whale_nebula.config.schema import PORT_CONFLICT_FIX, PORT_CONFLICT_REASON, cluster_of, find_shared_addresses
from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import did_you_mean

PORT = 7101
"""The default port of the first worker of a host; the next ones listen at the following ports."""
ANY = "127.0.0.1:0"
"""A local address whose port is chosen later."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The command line's request for a placement; `is_local` returns whether a host is this one."""

    cluster: str | None = None
    worker: int | None = None
    port: int = PORT
    is_local: Callable[[str], bool] = lambda host: False


@dataclass(frozen=True)
class Placement:
    """The workers that start on this host, and the addresses of all workers of the run."""

    here: tuple[str, ...]
    addresses: Mapping[str, str]

    def __post_init__(self) -> None:
        chosen = {worker: address for worker, address in self.addresses.items() if address != ANY}
        for _, conflict in find_shared_addresses(chosen):
            raise ConfigError(conflict, why=PORT_CONFLICT_REASON, mend=PORT_CONFLICT_FIX)

    @property
    def clusters(self) -> tuple[str, ...]:
        """The clusters of the run, in order."""
        return tuple(dict.fromkeys(map(cluster_of, self.addresses)))


class Declined(NamedTuple):
    """A resolver without a result, and the reason."""

    why: str


Resolver = Callable[[Config, Mapping[str, str], PlacementRequest], Placement | Declined]


def host_of(address: str) -> str:
    """The host in an address.

    >>> host_of("10.0.0.1:7101"), host_of("[::1]:7101")
    ('10.0.0.1', '::1')
    """
    return split_address(address)[0]


def choose_cluster(config: Config, request: PlacementRequest) -> str:
    """The requested cluster, or the only one."""
    names = list(config.clusters)
    if request.cluster is not None:
        if names and request.cluster not in names:
            raise ConfigError(
                f"the config has no cluster {request.cluster!r}",
                mend=f"--cluster: {did_you_mean(request.cluster, names)}",
            )
        return request.cluster
    if len(names) > 1:
        why = f"the config has several clusters: {', '.join(names)}"
        mend = f"--cluster {names[0]}; or --all, to start all of them on this machine"
        raise ConfigError("cannot determine the cluster of this host", why=why, mend=mend)
    return names[0] if names else "local"


def select_worker(
    cluster: str, request: PlacementRequest, count: int, default: int | None, *, variables: str = ""
) -> int:
    """The index of the requested worker in a cluster of `count` workers, or the `default`, which the environment gives.
    For the error, `variables` are the environment variables from which that is known, with their values.
    """
    number = request.worker if request.worker is not None else default
    if number is None or not 0 <= number < count:
        what = f"cluster {cluster!r} has no worker {number}"
        what = "cannot determine which worker this is" if number is None else what
        choice = "--worker 0" if count == 1 else f"--worker 0 ... --worker {count - 1}"
        variables = variables if request.worker is None else ""
        mend = f"set them as the platform does, or {choice}" if variables else choice
        why = f"cluster {cluster!r} has {count} worker{'s' * (count != 1)}"
        raise ConfigError(what, where=variables, why=why, mend=mend)
    return number


def add_other_clusters(config: Config, cluster: str, own: Mapping[str, str]) -> dict[str, str]:
    """The addresses of all workers: `own` are those of the cluster's workers, those of others are configured."""
    found: dict[str, str] = {}
    for each in config.clusters.values():
        if each.name == cluster:
            found |= own
        elif not each.workers:
            why = f"workers of {cluster!r} need their addresses"
            mend = f'clusters: {{{each.name}: {{workers: ["host:{PORT}"]}}}}'
            raise ConfigError(f"the config lists no workers of cluster {each.name!r}", why=why, mend=mend)
        else:
            found |= {f"{each.name}/{number}": worker.address for number, worker in enumerate(each.workers)}
    return found or dict(own)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def place_all_workers(config: Config, clusters: Sequence[str], is_local: Callable[[str], bool]) -> Placement:
    """All workers of the config's clusters, or one of each cluster that is named.

    An address of another machine is replaced by a local one with a free port.

    >>> place_all_workers(Config(), ["gpu", "npu"], lambda host: False).addresses
    {'gpu/0': '127.0.0.1:0', 'npu/0': '127.0.0.1:0'}
    """
    _check_names(clusters)
    known = config.clusters or {name: Cluster(name) for name in clusters}
    if not known:
        why = "the clusters in a script's scopes are known only when it runs"
        mend = "--all --clusters gpu,npu, or --all --config clusters.yaml"
        raise ConfigError("no clusters are specified", why=why, mend=mend)
    addresses: dict[str, str] = {}
    for cluster in known.values():
        given = [worker.address for worker in cluster.workers] or [ANY]
        addresses |= {
            f"{cluster.name}/{number}": each if is_local(host_of(each)) else ANY for number, each in enumerate(given)
        }
    return Placement(tuple(addresses), addresses)


def _check_names(clusters: Sequence[str]) -> None:
    """Refuse a `--clusters` value that is not a list of distinct names."""
    for number, each in enumerate(clusters):
        if not _NAME.fullmatch(each):
            meant = re.sub(r"[^A-Za-z0-9._-]+", "-", each).strip("-._") or "gpu"
            raise ConfigError(
                f"{each!r} is not a valid cluster name",
                where="--clusters",
                why="a name consists of letters, digits, '.', '_' and '-', and begins with a letter or digit",
                mend=f"--clusters {','.join([*clusters[:number], meant, *clusters[number + 1 :]])}",
            )
        if each in clusters[:number]:
            mend = f"--clusters {','.join(dict.fromkeys(clusters))}"
            raise ConfigError(f"duplicate cluster {each!r}", where="--clusters", mend=mend)


_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 0.1


def is_local(host: str) -> bool:
    """Whether a host is this one: by its name, or because its address can be bound. Queries no name server.

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


def assign_ports(placement: Placement) -> Placement:
    """The placement with a different free port for every address that has none yet."""
    found = {
        worker: f"{_LOOPBACK}:{free_port()}" if address == ANY else address
        for worker, address in placement.addresses.items()
    }
    return Placement(placement.here, found)


def find_listen_addresses(placement: Placement, *, is_configured: bool = False) -> dict[str, str]:
    """The address at which each worker of this host listens: its own, or all interfaces if no interface has it.

    All interfaces are needed behind address translation, where a host is reached by an address that it does not have. A
    port in use is reported now; a worker would report it only after loading TensorFlow. A host name that does not
    resolve is also reported if `is_configured`: a user wrote it; one that a platform provides may resolve seconds
    later.
    """
    return {
        worker: _find_listen_address(worker, placement.addresses[worker], is_configured) for worker in placement.here
    }


def _find_listen_address(worker: str, address: str, is_configured: bool) -> str:
    host, port = split_address(address)
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if is_configured:
            raise ConfigError(
                f"worker {worker} cannot listen at {address}: {host!r} does not resolve on this host",
                why=error.strerror,
                mend=f"replace {host} by its IP address in the config, or fix /etc/hosts or the name server",
            ) from None
    problem = _try_to_listen(host, port)
    if problem == errno.EADDRNOTAVAIL:
        host = "::" if ":" in host else "0.0.0.0"  # noqa: S104 - clients must present a certificate
        address, problem = f"[::]:{port}" if host == "::" else f"{host}:{port}", _try_to_listen(host, port)
    if problem is None:
        return address
    why = "another program or a worker of an earlier run listens there" if problem == errno.EADDRINUSE else None
    mend = "stop that process, or give the worker a different port in the config"
    raise ConfigError(f"worker {worker} cannot listen at {address}: {os.strerror(problem)}", why=why, mend=mend)


def await_free_ports(listen: Mapping[str, str], seconds: float) -> None:
    """Wait until these workers can listen, at most so long: the port of a process that has just ended may still be in
    use.
    """
    limit = time.monotonic() + seconds
    for worker, address in listen.items():
        host, port = split_address(address)
        while _try_to_listen(host, port) == errno.EADDRINUSE and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
        _find_listen_address(worker, address, is_configured=False)


def _try_to_listen(host: str, port: int) -> int | None:
    """The error that prevents listening at an address; None if there is none, or if only the worker can detect it."""
    with contextlib.suppress(socket.gaierror):
        family, kind, _, _, end = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(end)
            except OSError as error:
                return error.errno
    return None


# ---------------------------------------------------------------------- free ports
_FIRST, _COUNT = 10_000, 20_000  # below the ephemeral ports of outgoing connections
_TRIES = 1_000
_RESERVED: dict[int, socket.socket] = {}
_MOST_RESERVED = 128


@atexit.register
def _release_all() -> None:
    for port in list(_RESERVED):
        _release_port(port)


def free_port() -> int:
    """A free port of this host: no process listens at it, no outgoing connection takes it, and it is given out once.

    This process holds the UDP port of the same number until it has requested many more: so other callers of this
    function see that the port is reserved, though no process listens at it yet.
    """
    for _ in range(_TRIES):
        port = _FIRST + secrets.randbelow(_COUNT)
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if _can_bind(reservation, "127.0.0.1", port) and _is_free(port):
            _RESERVED[port] = reservation
            if len(_RESERVED) > _MOST_RESERVED:
                _release_port(next(iter(_RESERVED)))
            return port
        reservation.close()
    raise ConfigError(
        "this machine has no free port", mend=f"stop programs that use ports {_FIRST} to {_FIRST + _COUNT - 1}"
    )


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Reserve free ports until they are released."""
    ports = [free_port() for _ in range(count)]
    try:
        yield ports
    finally:
        for port in ports:
            _release_port(port)


def _release_port(port: int) -> None:
    if (reservation := _RESERVED.pop(port, None)) is not None:
        reservation.close()


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
