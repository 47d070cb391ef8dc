"""What this host's network is like: the size of packets, how losses are met, how many files may be open."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.host import Host
from whale_nebula.launch.resolve import host_of
from whale_nebula.transport.grpc.options import LANES_WITHOUT_BBR, congestion_control

_IP_MTU, _IPV6_MTU = 14, 24  # of linux/in.h and linux/in6.h: what the kernel knows of the way to an address
_USUAL_MTU = 1500
_SMALL_MTU = 1280
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_FILES_LEAST = 256  # a worker's own and its libraries'
_FILES_EACH = 8  # connections to one other, and what it takes to make them again


def network_checks(host: Host) -> Iterator[Check]:
    """All that concerns the network of this host."""
    yield from mtu_checks(host)
    yield congestion_check(congestion_control())
    yield files_check(len(host.workers))
    yield clock_check(_clock_is_set())


# ---------------------------------------------------------------------- packets
def mtu_checks(host: Host) -> Iterator[Check]:
    """The largest packet on the way to each other host, as far as the kernel knows."""
    found: dict[int, list[str]] = {}
    for address in dict.fromkeys(target.address for target in host.targets()):
        size = way_mtu(address)
        if size is not None:
            found.setdefault(size, []).append(host_of(address))
    for size, hosts in found.items():
        yield mtu_check(size, ", ".join(dict.fromkeys(hosts)))


def mtu_check(size: int, to: str) -> Check:
    """One size of packets."""
    if size < _SMALL_MTU:
        why = "packets so small cost time, and IPv6 needs 1280"
        return Check("MTU", "warning", f"{size} bytes to {to}", why, f"ip link set dev INTERFACE mtu {_USUAL_MTU}")
    if size < _USUAL_MTU:
        why = "a tunnel, it seems: see that ICMP 'packet too big' passes the firewalls, or large frames stand still"
        return Check("MTU", "note", f"{size} bytes to {to}", why)
    return Check("MTU", "ok", f"{size} bytes to {to}")


def way_mtu(address: str) -> int | None:
    """The MTU of the way to an address; None where there is no way, or the kernel does not say. Sends nothing."""
    host, port = host_of(address), int(address.rpartition(":")[2])
    with suppress(OSError):
        family, kind, _, _, end = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        level, option = (
            (socket.IPPROTO_IPV6, _IPV6_MTU) if family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
        )
        with socket.socket(family, kind) as trial:
            trial.connect(end)
            return trial.getsockopt(level, option)
    return None


# ---------------------------------------------------------------------- losses
def congestion_check(control: str) -> Check:
    """How this host's TCP meets losses: all but BBR take each for a sign that the line is full."""
    if control.startswith("bbr"):
        return Check("congestion control", "ok", control, "one connection to each peer")
    if not control:
        return Check("congestion control", "note", "unknown", f"{LANES_WITHOUT_BBR} connections to each peer")
    why = f"each lost packet slows it: {LANES_WITHOUT_BBR} connections to each peer are used instead of one"
    mend = "sysctl -w net.ipv4.tcp_congestion_control=bbr"
    return Check("congestion control", "warning", control, why, mend if _has_bbr() else f"modprobe tcp_bbr; {mend}")


def _has_bbr() -> bool:
    with suppress(OSError):
        return "bbr" in _AVAILABLE.read_text().split()
    return False


# ---------------------------------------------------------------------- files
def files_check(workers: int) -> Check:
    """How many more files a process here may open: each connection is one."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return files_found(limit, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, workers)


def files_found(limit: int, used: int, workers: int) -> Check:
    """The same by numbers.

    >>> files_found(1024, 24, 4).state, files_found(64, 24, 4).mend
    ('ok', 'ulimit -n 1024')
    """
    if limit == resource.RLIM_INFINITY:
        return Check("open files", "ok", "no limit")
    need, free = _FILES_LEAST + _FILES_EACH * workers, limit - used
    if free < need:
        why = f"a run with {workers} workers may need {need}"
        return Check("open files", "warning", f"{free} free", why, f"ulimit -n {max(1024, 2 * need)}")
    return Check("open files", "ok", f"{free} free", f"limit {limit}")


# ---------------------------------------------------------------------- the clock
_TIMEX_BYTES = 208
_TIME_ERROR = 5


def clock_check(is_set: bool | None) -> Check:
    """Whether the kernel knows its clock to be set by another one."""
    if is_set:
        return Check("clock", "ok", "synchronised", "by the kernel's word")
    why = "certificates are good by the clock of each host; five minutes behind is too much"
    if is_set is None:
        return Check("clock", "note", "not known whether it is right", why, "timedatectl")
    return Check("clock", "note", "the kernel does not know it to be right", why, "timedatectl set-ntp true")


def _clock_is_set() -> bool | None:
    """What adjtimex says when it is asked to change nothing."""
    try:
        found = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if found < 0 else found != _TIME_ERROR
