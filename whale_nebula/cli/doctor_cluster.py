"""Checks of `whale-nebula doctor --cluster`: this host's certificates, names, ports and links, and whether other hosts
are reachable.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.cli.arguments import Check, describe_time
from whale_nebula.config import Config
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, IdentityError
from whale_nebula.launch import gateways
from whale_nebula.launch.link_advice import (
    LinkMeasurement,
    advise,
    find_measurement_path,
    format_link_delay,
    format_link_rate,
    load_measurement,
)
from whale_nebula.launch.link_measurement import find_differences, list_versions
from whale_nebula.launch.placement import Placement, PlacementRequest, find_listen_addresses, host_of, is_local
from whale_nebula.launch.resolve import resolve
from whale_nebula.security import Credentials, Files, Identity
from whale_nebula.security.authority import KEY as AUTHORITY_KEY
from whale_nebula.security.diagnose import probe as probe_tls
from whale_nebula.security.files import find_other_keys, now
from whale_nebula.transport.grpc.options import LANES_WITHOUT_BBR, read_congestion_control
from whale_nebula.transport.grpc.options import probe_address as probe_tcp

GATEWAY = "gateway"


class Target(NamedTuple):
    """An identity that `here` must reach at an address; `dials` if `here` is the one that connects."""

    here: str
    there: str
    address: str
    dials: bool = True


@dataclass(frozen=True)
class Host:
    """A host of a cluster: `here` names its workers, and the gateway if it is there ("gpu/gateway"). `workers` are the
    addresses of all workers of the run, and `path` is the config's.
    """

    config: Config
    path: str
    cluster: str
    here: tuple[str, ...]
    workers: Mapping[str, str]

    @property
    def trains(self) -> bool:
        """Whether this host has a worker; a host with only a gateway needs no TensorFlow."""
        return any(not name.endswith(f"/{GATEWAY}") for name in self.here)

    @property
    def others(self) -> tuple[str, ...]:
        """The other clusters."""
        return tuple(name for name in self.clusters if name != self.cluster)

    @property
    def clusters(self) -> tuple[str, ...]:
        """All clusters of the run."""
        return tuple(dict.fromkeys([*self.config.clusters, *map(cluster_of, self.workers)]))

    def identity(self, name: str) -> Identity:
        """The identity of a worker or gateway, as in certificates."""
        return Identity.of_worker(self.config.run_name, name)

    def address(self, name: str) -> str:
        """The address at which an identity of this host listens."""
        return self.workers[name] if name in self.workers else self.config.gateway_of(self.cluster) or ""

    def files(self, name: str) -> Files | None:
        """The certificate files of an identity of this host; None if the config is insecure."""
        if self.config.security.insecure:
            return None
        return Files.from_config(self.config.security, self.identity(name), os.path.dirname(os.path.abspath(self.path)))

    def credentials(self, name: str) -> Credentials | None:
        """The credentials of an identity of this host; None if they are invalid, which another check reports."""
        files = self.files(name)
        try:
            return None if files is None else Credentials.load(files)
        except IdentityError:
            return None

    def targets(self) -> Iterator[Target]:
        """The identities that this host must reach: from a gateway the other gateways; from a worker its gateway, if
        any, the other workers of its cluster, and without a gateway those of other clusters.
        """
        gateway = self.config.gateway_of(self.cluster)
        for name in self.here:
            if name.endswith(f"/{GATEWAY}"):
                for cluster in self.others:
                    if (address := self.config.gateway_of(cluster)) is not None:
                        yield Target(name, f"{cluster}/{GATEWAY}", address)
                continue
            if gateway is not None and self.others:
                yield Target(name, f"{self.cluster}/{GATEWAY}", gateway)
            for there, address in self.workers.items():
                near = cluster_of(there) == self.cluster
                if there not in self.here and (near or gateway is None):
                    yield Target(name, there, address, dials=name > there)


def find_host(config: Config, path: str, cluster: str, *, worker: int | None = None, gateway: bool = False) -> Host:
    """Determine which host of the config this is, by `worker` or `gateway`, otherwise by its network addresses."""
    if config.clusters and cluster not in config.clusters:
        resolve(config, os.environ, PlacementRequest(cluster))  # its error suggests a cluster
    address = config.clusters[cluster].gateway if cluster in config.clusters else None
    has_gateway = gateway or (worker is None and address is not None and is_local(host_of(address)))
    try:
        found = resolve(config, os.environ, PlacementRequest(cluster, worker, is_local=is_local)).placement
        here, workers = found.here, found.addresses
    except ConfigError:
        if not has_gateway:
            raise
        here, workers = (), config.addresses
    if has_gateway and worker is None and (gateway or not any(is_local(host_of(workers[each])) for each in here)):
        here = ()
    if has_gateway and address is None:
        mend = f'clusters: {{{cluster}: {{gateway: "10.77.0.1:7100"}}}}'
        raise ConfigError(f"cluster {cluster!r} has no gateway", where=path, mend=mend)
    return Host(config, path, cluster, (*here, *[f"{cluster}/{GATEWAY}"] * has_gateway), workers)


_SOON = timedelta(days=2)


def check_certificates(host: Host) -> Iterator[Check]:
    """Checks of certificates: of each identity of this host its certificate, its key and other keys next to that; and
    those of the authority.
    """
    authority: list[Check] = []
    for name in host.here:
        files = host.files(name)
        if files is None:
            continue
        try:
            credentials = Credentials.load(files)
            credentials.check_identity(host.identity(name))
        except IdentityError as error:
            why = ": ".join(part for part in (error.where, error.why) if part)
            yield Check(f"certificate of {name}", "bad", error.what, why, error.mend)
            continue
        identity, ends = credentials.identity, credentials.not_after
        who = f"--cluster {identity.cluster} --role {identity.role} --index {identity.index}"
        mend = f"whale-nebula certs renew {who}, and copy its .pem here; a run can continue"
        yield _check_time_left(f"certificate of {name}", ends, identity.uri, mend)
        mode = stat.S_IMODE(os.stat(files.key).st_mode)  # readable by the owner only, as its credentials were loaded
        yield Check(f"key of {name}", "ok", f"{mode:04o}", str(files.key))
        yield from _check_other_keys(host, name, files)
        authority = list(_check_authority(credentials))
    yield from authority


def _check_time_left(label: str, ends: datetime, what: str, mend: str) -> Check:
    left = ends - now()
    found, why = f"{describe_time(left)} left", f"until {ends:%Y-%m-%d %H:%M} UTC; {what}"
    return Check(label, "warning", found, why, mend) if left < _SOON else Check(label, "ok", found, why)


def _check_other_keys(host: Host, name: str, files: Files) -> Iterator[Check]:
    """A warning if the folder has private keys that belong to no identity of this host."""
    here = {host.identity(each).stem for each in host.here}
    others = [path.name for path in find_other_keys(files) if path.stem not in here and path.name != AUTHORITY_KEY]
    if others:
        why = f"{', '.join(others)} in {files.key.parent}: {name} could act as any of them"
        yield Check(f"keys next to {name}", "warning", f"{len(others)} of others", why, "remove them from this host")


def _check_authority(credentials: Credentials) -> Iterator[Check]:
    """Checks of the authority: its dates; its key, which must be only on the host that issues certificates; and its
    deny list, whose number is the same on all up-to-date hosts.
    """
    ca = credentials.files.ca
    ends = max(each.not_valid_after_utc for each in credentials.trust.authorities)
    yield _check_time_left("authority", ends, str(ca), "whale-nebula certs renew --ca, and copy ca.pem to all hosts")
    if ca.with_name(AUTHORITY_KEY).exists():
        why = f"{ca.with_name(AUTHORITY_KEY)}: whoever has it can impersonate any process of this run"
        mend = "if certificates are issued on another host, remove it from this one"
        yield Check("authority's key", "note", "it is here", why, mend)
    if credentials.files.revoked is None:
        why = "security: {revoked: none}: revoked certificates are accepted here"
        yield Check("deny list", "note", "none", why, "remove this setting once each host has revoked.json")
    else:
        yield Check("deny list", "ok", f"number {credentials.trust.denied.number}", str(credentials.files.revoked))


_OLD = timedelta(days=7)
"""The age from which on a measurement of a link should be repeated."""
_CLOCK_WARNING, _CLOCK_BAD = 1.0, 60.0


def check_links(host: Host) -> Iterator[Check]:
    """Checks for each other cluster: rate and delay, clocks, and versions."""
    own_versions = list_versions()
    code = f"whale_nebula {own_versions['whale_nebula']}, TensorFlow {own_versions['tensorflow'] or 'not installed'}"
    yield Check("versions here", "ok", f"code {own_versions['code']}", f"{code}: must be the same in every cluster")
    for cluster in host.others:
        found = load_measurement(find_measurement_path(host.path, host.cluster, cluster))
        command = f"whale-nebula bench link --config {host.path} --cluster {host.cluster}"
        if found is None or set(found.clusters) != {host.cluster, cluster}:
            configured = str(host.config.links.between(host.cluster, cluster))
            why = f"in the config: {'no rate' if configured == 'free' else configured}"
            mend = f"{command}, and there with --cluster {cluster}"
            yield Check(f"link to {cluster}", "note", "not measured yet", why, mend)
            continue
        age = timedelta(seconds=max(1.0, time.time() - found.when))
        ago = f"measured {describe_time(age)} ago"
        yield _check_link(host, cluster, found, ago, measure_command=command if age > _OLD else "")
        yield check_clock(found, cluster, ago)
        peer_versions = found.sheets.get(found.second if found.clusters[1] == cluster else found.first, {})
        yield check_versions(cluster, own_versions, peer_versions, ago)


def _check_link(host: Host, cluster: str, found: LinkMeasurement, ago: str, *, measure_command: str) -> Check:
    advice = advise(found, host.config.links.between(*found.clusters))
    text, label = f"{format_link_rate(found.bits)}, {format_link_delay(found.delay)}", f"link to {cluster}"
    if not advice.agrees:
        return Check(label, "warning", text, f"{advice.why}; {ago}", advice.write)
    if measure_command:
        return Check(label, "note", text, ago, measure_command)
    return Check(label, "ok", text, f"{advice.why}; {ago}")


def check_clock(found: LinkMeasurement, cluster: str, ago: str) -> Check:
    """Check the difference between the clocks of the two ends, as measured `ago`."""
    apart, label = abs(found.clock), f"clock of {cluster}"
    if apart < _CLOCK_WARNING:
        return Check(label, "ok", f"{1e3 * apart:.0f} ms apart", ago)
    ahead = (found.clock > 0) == (found.clusters[1] == cluster)
    text = f"{apart:.1f} s {'ahead' if ahead else 'behind'}"
    why = f"{ago}; each host checks certificates by its own clock, and one that is five minutes behind refuses new ones"
    return Check(label, "warning" if apart < _CLOCK_BAD else "bad", text, why, "timedatectl set-ntp true on both hosts")


def check_versions(cluster: str, own_versions: Mapping[str, Any], peer_versions: Mapping[str, Any], ago: str) -> Check:
    """Check that the other end has the same versions, as different ones trace different programs."""
    differ = find_differences(own_versions, peer_versions)
    if not differ:
        return Check(f"versions at {cluster}", "ok", "same as here", ago)
    found = "; ".join(f"{name} {there}, here {here}" for name, (here, there) in differ.items())
    if list(differ) == ["code"]:
        why = f"{ago}; same release with different source: a run compares the programs that both trace"
        return Check(f"versions at {cluster}", "note", found, why, "install the same commit in every cluster")
    mend = "install the same versions in every cluster, then run bench link again to check"
    return Check(f"versions at {cluster}", "warning", found, f"{ago}; a run would refuse to start", mend)


_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_FILES_LEAST = 256  # a worker's own and its libraries'
_FILES_EACH = 8  # connections to another worker, and spare ones to reconnect


def check_network(host: Host) -> Iterator[Check]:
    """Checks of TCP's congestion control and of the number of open files."""
    yield check_congestion_control(read_congestion_control())
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0], used, len(host.workers))


# ---------------------------------------------------------------------- this host
def check_congestion_control(control: str) -> Check:
    """Check TCP's congestion control: all but BBR treat each loss as a sign of a congested link."""
    if control.startswith("bbr"):
        return Check("congestion control", "ok", control, "one connection to each peer")
    if not control:
        return Check("congestion control", "note", "unknown", f"{LANES_WITHOUT_BBR} connections to each peer")
    why = f"it slows down after each lost packet: {LANES_WITHOUT_BBR} connections to each peer are used instead of one"
    load = "modprobe tcp_bbr; "
    with suppress(OSError):
        load = "" if "bbr" in _AVAILABLE.read_text().split() else load
    mend = f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr"
    return Check("congestion control", "warning", control, why, mend)


def check_open_files(limit: int, used: int, workers: int) -> Check:
    """Check how many more files a process may open, as each connection is one.

    >>> check_open_files(1024, 24, 4).state, check_open_files(64, 24, 4).mend
    ('ok', 'ulimit -n 1024')
    """
    if limit == resource.RLIM_INFINITY:
        return Check("open files", "ok", "no limit")
    need, free = _FILES_LEAST + _FILES_EACH * workers, limit - used
    if free < need:
        why = f"a run with {workers} workers may need {need}"
        return Check("open files", "warning", f"{free} free", why, f"ulimit -n {max(1024, 2 * need)}")
    return Check("open files", "ok", f"{free} free", f"limit {limit}")


_SECONDS = 5.0
_AT_ONCE = 16


# ---------------------------------------------------------------------- names
def check_host_names(host: Host) -> Iterator[Check]:
    """Check whether the host names in the config resolve."""
    named = {host_of(each) for each in (*host.workers.values(), *(t.address for t in host.targets()))}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(sorted(named), pool.map(_resolve_name, sorted(named)), strict=True))
    wrong = {name: why for name, (right, why) in found.items() if not right}
    for name, why in wrong.items():
        mend = f"replace {name} by its IP address in {host.path}, or fix /etc/hosts or the name server"
        yield Check("host name", "bad", f"{name} does not resolve", why, mend)
    if not wrong:
        addresses = ", ".join(f"{name} is {number}" for name, (_, number) in found.items() if name != number)
        yield Check("host names", "ok", f"{len(found)} resolved", addresses)


def _resolve_name(name: str) -> tuple[bool, str]:
    try:
        return True, str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return False, error.strerror or str(error)


# ---------------------------------------------------------------------- own ports
def _check_port(host: Host, name: str, address: str) -> Check:
    """Check whether an identity of this host can listen at its configured address."""
    label = f"port of {name}"
    try:
        found = find_listen_addresses(Placement((name,), {name: address}), is_configured=True)[name]
    except ConfigError as error:  # the port is in use, which is right if this worker itself listens there
        own = host.credentials(name)
        if own is not None and probe_tls(address, own, host.identity(name), timeout=_SECONDS) is None:
            return Check(label, "ok", address, f"{name} is running and listens there")
        return Check(label, "bad", f"{address} is not available", error.why or error.what, error.mend)
    if found == address:
        return Check(label, "ok", address, "free")
    why = f"no interface of this host has {host_of(address)}: it will listen at {found}"
    if host.config.security.insecure:
        return Check(
            label, "bad", address, f"{why}, and accept anyone", "remove it from this host, or use certificates"
        )
    return Check(label, "note", address, f"{why}, which is correct only behind address translation")


# ---------------------------------------------------------------------- others
def check_reachability(host: Host) -> list[Check]:
    """Check whether all targets of this host are reachable, and would accept its certificates."""
    targets = list(host.targets())
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda target: _check_target(host, target), targets))


def _check_target(host: Host, target: Target) -> Check:
    label = f"{target.here} to {target.there}"
    started = time.monotonic()
    probe = probe_tcp(target.address, _SECONDS)
    took = f"{1e3 * (time.monotonic() - started):.0f} ms to connect"
    if probe.outcome != "open":
        return _describe_closed(label, target, probe.outcome, probe.why)
    credentials = host.credentials(target.here)
    if credentials is None and not host.config.security.insecure:
        return Check(
            label, "note", target.address, "open; TLS was not checked, because the certificate is missing here"
        )
    wrong = probe_tls(target.address, credentials, host.identity(target.there), timeout=_SECONDS)
    if wrong is None:
        secured = "mutual TLS works" if credentials is not None else "it answers, without TLS"
        return Check(label, "ok", target.address, f"{secured}; {took}")
    error, side = wrong.error, "at this end" if wrong.side == "here" else "at the other end"
    state = "note" if wrong.kind == "unreachable" else "bad"
    why = f"{error.what} ({error.why})" if error.why else error.what
    return Check(label, state, f"{target.address}: {wrong.kind}, {side}", why, error.mend)


def _describe_closed(label: str, target: Target, found: str, why: str) -> Check:
    """The check of a target to which no connection was made: a note if it refuses, as it may not have been started, or
    if it is the one that connects.
    """
    if found == "refused":
        command = "gateway" if target.there.endswith("gateway") else "run"
        why = "the host is up, but nothing listens there yet; start it, then run doctor again"
        return Check(label, "note", f"{target.address} refuses", why, f"there: whale-nebula {command} ...")
    if not target.dials:
        return Check(
            label, "note", f"{target.address} is unreachable", f"{why}; {target.there} is the one that connects"
        )
    mend = "check the address, the firewalls of both sites, and whether the host is up"
    return Check(label, "bad", f"{target.address} is unreachable", why, mend)


def check_cluster(host: Host) -> list[Check]:
    """All checks of a cluster's host: local ones first, then reachability, then the links."""
    names = ", ".join(host.here)
    return [
        Check("this host", "ok", names, f"cluster {host.cluster}, run {host.config.run_name}"),
        *check_gateway_config(host),
        *check_certificates(host),
        *check_host_names(host),
        *(_check_port(host, name, host.address(name)) for name in host.here),
        *check_reachability(host),
        *check_network(host),
        *check_links(host),
    ]


def check_gateway_config(host: Host) -> Iterator[Check]:
    """Check whether every cluster has a gateway or none: this one by the config, the others as far as it lists them."""
    try:
        gateways.check_gateways(host.config, host.cluster)
    except ConfigError as error:
        yield Check("gateways", "bad", error.what, error.why, error.mend)
    silent = [name for name in host.others if host.config.gateway_of(name) is None]
    if host.config.gateway_of(host.cluster) is not None and silent:
        why = "correct if its gateway cannot be reached from here: then it connects to this one"
        yield Check("gateways", "note", f"none of {', '.join(silent)}", why)
