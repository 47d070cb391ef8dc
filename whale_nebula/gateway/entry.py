"""Who comes to a gateway, and as what: one of its own workers, another gateway for a pair, or for itself."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from whale_nebula.errors import IdentityError, NotAllowedError
from whale_nebula.gateway.site import Site, cluster_of
from whale_nebula.security import CurrentCredentials, Identity, Peer, policy
from whale_nebula.security.identity import GATEWAY, WORKER
from whale_nebula.security.policy import Call
from whale_nebula.transport.grpc.listener import Visitor
from whale_nebula.transport.grpc.metadata import Knock


class Purpose(Enum):
    """What a stream is for."""

    OUT = "a worker of this cluster, for one of another"
    IN = "another gateway, for a worker of its cluster"
    TRUNK = "another gateway, for itself"


class Entry(NamedTuple):
    """A stream that may come in: what for, and from whom. `here` and `there` are the pair, empty for a trunk."""

    purpose: Purpose
    caller: Identity
    guest: Peer | None
    here: str = ""
    there: str = ""


def entry(site: Site, current: CurrentCredentials | None, knock: Knock, visitor: Visitor) -> Entry:
    """What a knock asks for, if who knocks may ask for it; whatever is not allowed here by name is denied."""
    if knock.run != site.run:
        raise IdentityError(
            f"this is the gateway of cluster '{site.cluster}' of run '{site.run}'",
            why=f"'{knock.source}' is of run '{knock.run}'",
            mend="compare 'run' and the addresses in the clusters' configs",
        )
    source = Identity.of_worker(knock.run, knock.source)
    purpose = _purpose(site, source)
    caller = Identity(site.run, source.cluster, GATEWAY) if purpose is Purpose.IN else source
    guest = _guest(current, visitor, caller)
    call = Call.AUDIT_HEADS if purpose is Purpose.TRUNK else Call.RELAY
    policy.check(caller, call, site.identity)
    if purpose is Purpose.TRUNK:
        return Entry(purpose, caller, guest)
    here, there = (knock.source, knock.destination)[:: 1 if purpose is Purpose.OUT else -1]
    _check_worker(site, here, site.cluster)
    _check_worker(site, there, None)
    return Entry(purpose, caller, guest, here, there)


def admit(current: CurrentCredentials | None, site: Site, visitor: Visitor) -> None:
    """Whether somebody may ask how the gateway is: anybody whose certificate is good."""
    if current is not None:
        guest = current().trust.check(visitor.certificate, whose="who asks for the health")
        policy.check(guest.identity, Call.HEALTH, site.identity)


def _purpose(site: Site, source: Identity) -> Purpose:
    if source.cluster == site.cluster:
        return Purpose.OUT
    return Purpose.TRUNK if source.role == GATEWAY else Purpose.IN


def _guest(current: CurrentCredentials | None, visitor: Visitor, caller: Identity) -> Peer | None:
    """His certificate, if it is good and names him."""
    return None if current is None else current().trust.check(visitor.certificate, caller)


def _check_worker(site: Site, name: str, cluster: str | None) -> None:
    """Whether frames may go to and from a worker: one of this cluster, or of one that this gateway knows."""
    identity = Identity.of_worker(site.run, name)
    known = (cluster,) if cluster is not None else tuple(site.gateways)
    listed = [worker for worker in site.workers if cluster_of(worker) == identity.cluster]
    if identity.role != WORKER or identity.cluster not in known or (listed and name not in listed):
        raise NotAllowedError(
            f"no frames go to or from '{name}' here",
            where=site.identity.worker,
            why=f"this gateway joins {', '.join(listed) or site.cluster} with workers of {', '.join(site.gateways)}"
            if not listed
            else f"the workers of cluster '{identity.cluster}' are {', '.join(listed)}",
            mend="give all clusters the same list of workers, and start this gateway again",
        )
