"""Meetings of local SGD that lost clusters may miss: which clusters take part in an exchange, by one decision.

One cluster, which must always be present, decides for each exchange. The others send it their differences. It waits for
each of them, at most for the patience of the run, and sends all that have arrived to the clusters they came from,
together with the list of these clusters. All of them average the same differences, so their shared weights stay
bit-identical. A cluster that is not on the list, or does not get it, never goes on by itself: its processes end, are
started again, and join the others when these leave after a common step (ADR 48).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import NebulaError, PlanMismatchError, RemoteProtocolError
from whale_nebula.errors.text import list_names
from whale_nebula.runtime.local_sgd.topology import Ends
from whale_nebula.runtime.session.absences import Absences
from whale_nebula.transport.base import receive_each
from whale_nebula.wire.tensor import Bytes

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run

_LOG = logging.getLogger("whale_nebula.runtime.run")
_DIGEST_BYTES = 4
_DECISION_PATIENCES = 2
"""The patiences within which a decision arrives: the decider may be late by one, and then waits for others for one."""


class Decision(NamedTuple):
    """The clusters whose differences are averaged in an exchange, in the order of all clusters, and a checksum of the
    decider's shared weights before it.

    >>> decision = Decision(("gpu", "npu"), 7)
    >>> decode_decision(encode_decision(decision, ("gpu", "npu", "tpu")), ("gpu", "npu", "tpu")) == decision
    True
    """

    members: tuple[str, ...]
    digest: int


def encode_decision(decision: Decision, order: Sequence[str]) -> Bytes:
    """The bytes of a decision on these clusters."""
    flags = bytes(name in decision.members for name in order)
    return np.frombuffer(flags + decision.digest.to_bytes(_DIGEST_BYTES, "big"), np.uint8)


def decode_decision(data: Bytes, order: Sequence[str]) -> Decision:
    """The decision in these bytes, which another process has sent."""
    if data.dtype != np.uint8 or data.size != len(order) + _DIGEST_BYTES:
        raise RemoteProtocolError(f"received {data.nbytes} bytes as the decision on {len(order)} clusters")
    members = tuple(name for name, flag in zip(order, data, strict=False) if flag)
    return Decision(members, int.from_bytes(data[len(order) :].tobytes(), "big"))


def share_among(shares: Mapping[str, float], members: Collection[str]) -> Mapping[str, float]:
    """The weights of these clusters in the mean of their differences, of sum 1; `shares` are those of all clusters.

    >>> share_among({"gpu": 0.5, "npu": 0.25, "tpu": 0.25}, ("gpu", "npu", "tpu"))
    {'gpu': 0.5, 'npu': 0.25, 'tpu': 0.25}
    >>> share_among({"gpu": 0.5, "npu": 0.25, "tpu": 0.25}, ("npu", "tpu"))
    {'npu': 0.5, 'tpu': 0.5}
    """
    if len(members) == len(shares):
        return shares
    whole = sum(share for name, share in shares.items() if name in members)
    return {name: share / whole for name, share in shares.items() if name in members}


@dataclass(frozen=True)
class DecidedEnds(Ends):
    """Ends of an exchange in which the cluster `decider` decides who takes part. `order` are all clusters of the run,
    `away` those that are absent, by the decisions so far: only the thread that receives adds to it. `links` keep those
    to lost workers, which are closed.
    """

    order: tuple[str, ...] = field(kw_only=True)
    decider: str = field(kw_only=True)
    absences: Absences = field(kw_only=True)
    away: set[str] = field(kw_only=True, default_factory=set)

    @property
    def others(self) -> Mapping[str, str]:
        """The first workers of the other clusters that are present."""
        return {cluster: first for cluster, first in super().others.items() if cluster not in self.away}

    @property
    def absent(self) -> tuple[str, ...]:
        """The clusters that do not take part since the last exchange."""
        return tuple(name for name in self.order if name in self.away)

    @property
    def _numbered_clusters(self) -> Sequence[str]:
        return self.order

    @property
    def _decides(self) -> bool:
        return self.cluster == self.decider

    def send_fragment(self, round_number: int, fragment: int, data: Bytes, raw: int) -> None:
        """Send a fragment to the decider; the decider sends its own to all others."""
        if not self.is_lead:
            return
        if self._decides:
            for cluster, first in self.others.items():
                with self.absences.tolerate(first):
                    key = self._key(round_number, fragment, self.cluster, first, self.worker)
                    self.links[first].announce_receive(key)
                    self._send(self._key(round_number, fragment, cluster, self.worker, first), data, raw)
            return
        first = self.lead_workers[self.decider]
        for cluster in ("", self.cluster):
            self.links[first].announce_receive(self._key(round_number, fragment, cluster, first, self.worker))
        self._send(self._key(round_number, fragment, self.decider, self.worker, first), data, raw)

    def receive_fragments(
        self, round_number: int, fragment: int, compute_digest: Callable[[], int] = lambda: 0
    ) -> Mapping[str, Bytes]:
        """Receive a message from each other cluster that takes part, by name, and record those that do not."""
        if self.is_lead and self._decides:
            received = self._gather(round_number, fragment)
            decision = Decision(tuple(n for n in self.order if n == self.cluster or n in received), compute_digest())
            for cluster in received:
                with self.absences.tolerate(self.lead_workers[cluster]):
                    self._pass_on(round_number, fragment, self.lead_workers[cluster], decision, received, (cluster,))
        else:
            source = self.lead_workers[self.decider if self.is_lead else self.cluster]
            decision, received = self._receive_decided(round_number, fragment, source, compute_digest)
        self.away.update(name for name in self.order if name not in decision.members)
        for mate in self.mates if self.is_lead else ():
            self._pass_on(round_number, fragment, mate, decision, received, ())
        return received

    def _gather(self, round_number: int, fragment: int) -> dict[str, Bytes]:
        """The differences of the other clusters that arrive within the patience."""
        own, received = self.cluster, {}
        near = {cluster: first for cluster, first in self.others.items() if self.absences.find_error(cluster) is None}
        keys = {cluster: self._key(round_number, fragment, own, each, self.worker) for cluster, each in near.items()}
        for cluster, find in receive_each({cluster: partial(self._receive, key) for cluster, key in keys.items()}):
            with self.absences.tolerate(near[cluster]):
                received[cluster] = np.asarray(find())
        return received

    def _pass_on(
        self, round_number: int, fragment: int, worker: str, decision: Decision, received: Mapping[str, Bytes],
        excluded: Collection[str],
    ) -> None:  # fmt: skip
        """Send a worker the decision and the received differences, except those of the `excluded` clusters."""
        data = encode_decision(decision, self.order)
        self._send(self._key(round_number, fragment, "", self.worker, worker), data, data.nbytes)
        for cluster, each in received.items():
            if cluster not in excluded:
                self._send(self._key(round_number, fragment, cluster, self.worker, worker), each, each.nbytes)

    def _receive_decided(
        self, round_number: int, fragment: int, source: str, compute_digest: Callable[[], int]
    ) -> tuple[Decision, dict[str, Bytes]]:
        """The decision, and the differences of the other members, from the decider or from this cluster's lead."""
        limit = _DECISION_PATIENCES * self.patience
        data = self._receive(self._key(round_number, fragment, "", source, self.worker), limit)
        decision = decode_decision(np.asarray(data), self.order)
        if decision.digest != compute_digest():
            raise PlanMismatchError(
                f"{self.worker} and {source} no longer have the same shared weights, in exchange {round_number}",
                where=source,
                why="all compute the shared weights from the same bytes, so a device has computed them differently",
                mend="start all workers from a checkpoint",
            )
        earlier = self.order[: self.order.index(self.cluster)]  # of two that cannot reach each other, one ends
        self.absences.check_members([each for each in earlier if each in decision.members], limit)
        received = {}
        for cluster in decision.members:
            if cluster != self.cluster:
                direct = self.is_lead and cluster == self.decider
                key = self._key(round_number, fragment, self.cluster if direct else cluster, source, self.worker)
                received[cluster] = np.asarray(self._receive(key))
        return decision, received


def accept_return(run: Run, cluster: str) -> None:
    """Accept connections from new processes of a cluster whose link was lost here. The run goes on without it from the
    next decision on; until then, its processes learn that they have to wait.
    """
    session = run.ledger.session
    if session.await_return is not None:
        session.await_return([worker for worker, name in run.workers.items() if name == cluster])


def continue_without(run: Run, clusters: Sequence[str]) -> None:
    """Go on without these clusters, as all other processes do after the same exchange: their links are closed, nothing
    waits for them, and they are expected to return.
    """
    session, attachment = run.ledger.session, run.attachment
    lost = {worker for worker, cluster in run.workers.items() if cluster in clusters}
    if attachment is None or not lost:
        return
    reasons = (session.absences.find_error(cluster) for cluster in clusters)
    why = "; ".join(error.what for error in reasons if isinstance(error, NebulaError))
    _LOG.warning(
        "%s: the run goes on without %s%s; its steps since the last meeting are lost, and it may return",
        session.worker,
        list_names(clusters),
        f" ({why})" * bool(why),
    )
    addresses = {worker: attachment.addresses[worker] for worker in sorted(lost)}
    run.attachment = replace(
        attachment,
        peers={worker: cluster for worker, cluster in attachment.peers.items() if worker not in lost},
        addresses={worker: address for worker, address in attachment.addresses.items() if worker not in lost},
        absent={**attachment.absent, **addresses},
    )
    run.hosts = {worker: host for worker, host in run.hosts.items() if worker not in lost}
    if attachment.heartbeat_sender is not None:
        absent = {*map(cluster_of, run.attachment.absent)} - {*run.workers.values()}
        attachment.heartbeat_sender.send(missed=sorted(absent))
    links = [session.links.pop(worker) for worker in sorted(lost)]
    for link in links:
        link.fail({"what": f"the run went on without {list_names(clusters)}"})
    if run.checkpoints is not None:
        run.checkpoints.continue_without(lost)
    if session.await_return is not None:
        session.await_return(addresses)
    for link in links:  # waits for what is on its way to a worker that may be unreachable
        threading.Thread(target=link.close, name=f"nebula-close-{link.there}", daemon=True).start()
