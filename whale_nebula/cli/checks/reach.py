"""Names, own ports, and whether the others are reached: over TCP, then over TLS with the certificates of this host."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.host import Host, Target
from whale_nebula.errors import ConfigError
from whale_nebula.launch.hosts import listening
from whale_nebula.launch.resolve import Placement, host_of
from whale_nebula.security.diagnose import probe as probe_tls
from whale_nebula.transport.grpc.probing import probe as probe_tcp

_SECONDS = 5.0
_AT_ONCE = 16


# ---------------------------------------------------------------------- names
def name_checks(host: Host) -> Iterator[Check]:
    """Whether the names of hosts in the config mean anything here."""
    named = {host_of(each) for each in (*host.workers.values(), *(t.address for t in host.targets()))}
    with ThreadPoolExecutor(_AT_ONCE) as beside:
        found = dict(zip(sorted(named), beside.map(_resolved, sorted(named)), strict=True))
    wrong = {name: why for name, (right, why) in found.items() if not right}
    for name, why in wrong.items():
        mend = f"write its number instead of {name} in {host.path}, or mend /etc/hosts or the name server"
        yield Check("host name", "bad", f"{name} is unknown", why, mend)
    if not wrong:
        said = ", ".join(f"{name} is {number}" for name, (_, number) in found.items() if name != number)
        yield Check("host names", "ok", f"{len(found)} known", said)


def _resolved(name: str) -> tuple[bool, str]:
    try:
        return True, str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return False, error.strerror or str(error)


# ---------------------------------------------------------------------- own ports
def port_checks(host: Host) -> Iterator[Check]:
    """Whether those who are here can listen where the config says."""
    for name in host.here:
        yield _port(host, name, host.address(name))


def _port(host: Host, name: str, address: str) -> Check:
    label = f"port of {name}"
    try:
        found = listening(Placement((name,), {name: address}), written=True)[name]
    except ConfigError as error:
        return _taken(host, name, address, error)
    if found == address:
        return Check(label, "ok", address, "free")
    why = f"no interface here has {host_of(address)}: it will listen at {found}"
    if host.config.security.insecure:
        return Check(label, "bad", address, f"{why}, and to everybody", "take it away from this host, or secure it")
    return Check(label, "note", address, f"{why}, which is right behind address translation only")


def _taken(host: Host, name: str, address: str, error: ConfigError) -> Check:
    """Somebody listens there: that is as it should be if it is himself."""
    credentials = host.credentials(name)
    if credentials is not None and probe_tls(address, credentials, host.identity(name), timeout=_SECONDS) is None:
        return Check(f"port of {name}", "ok", address, f"{name} runs, and listens there")
    return Check(f"port of {name}", "bad", f"{address} cannot be had", error.why or error.what, error.mend)


# ---------------------------------------------------------------------- others
def reach_checks(host: Host) -> list[Check]:
    """Whether everybody is there whom this host must reach, and what each would say to its certificates."""
    targets = list(host.targets())
    with ThreadPoolExecutor(_AT_ONCE) as beside:
        return list(beside.map(lambda target: _reached(host, target), targets))


def _reached(host: Host, target: Target) -> Check:
    label = f"{target.here} to {target.there}"
    started = time.monotonic()
    found = probe_tcp(target.address, _SECONDS)
    took = f"{1e3 * (time.monotonic() - started):.0f} ms to connect"
    if found.found != "open":
        return _closed(label, target, found.found, found.why)
    credentials = host.credentials(target.here)
    if credentials is None and not host.config.security.insecure:
        return Check(label, "note", target.address, "it is open; TLS needs the certificate that is missing here")
    wrong = probe_tls(target.address, credentials, host.identity(target.there), timeout=_SECONDS)
    if wrong is None:
        secured = "mutual TLS stands" if credentials is not None else "it answers, without TLS"
        return Check(label, "ok", target.address, f"{secured}; {took}")
    error, side = wrong.error, "at this end" if wrong.side == "here" else "at the other end"
    state = "note" if wrong.kind == "unreachable" else "bad"
    why = f"{error.what} ({error.why})" if error.why else error.what
    return Check(label, state, f"{target.address}: {wrong.kind}, {side}", why, error.mend)


def _closed(label: str, target: Target, found: str, why: str) -> Check:
    """What listens nowhere yet may do so later; who is not heard at all stands behind something."""
    if found == "refused":
        command = "gateway" if target.there.endswith("gateway") else "run"
        said = "its host answers, and nothing listens there yet; start it, then ask again to see more"
        return Check(label, "note", f"{target.address} refuses", said, f"there: whale-nebula {command} ...")
    if not target.dials:
        return Check(label, "note", f"{target.address} is not reached", f"{why}; it is {target.there} that dials")
    said = "look at the address, at the firewalls of both sites, and at whether the host is up"
    return Check(label, "bad", f"{target.address} is not reached", why, said)
