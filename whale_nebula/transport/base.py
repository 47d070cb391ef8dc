"""The link of two workers, as the runtime calls it, and the interface of the carriers that links use.

A link receives from a mailbox, checks keys, counts, and reports why nothing arrives. The carrier below it transmits
complete frames between two workers without interpreting them. It reconnects whenever its connection breaks; frames in
flight are then lost, and the link retransmits them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import (
    DamagedFrameError,
    DeadlineError,
    InputMismatchError,
    LinkClosedError,
    LocalProtocolError,
    NebulaError,
    PlanMismatchError,
    RemoteFailureError,
)
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.transport.mailbox import Mailbox
from whale_nebula.transport.protocol import Key, LinkTotals, OnSent, Payload
from whale_nebula.wire.frame import HEADER_BYTES
from whale_nebula.wire.message import check_outgoing_message
from whale_nebula.wire.tensor import Bytes


@dataclass(frozen=True, slots=True)
class CarrierState:
    """State of a carrier: whether it is connected, the number of connections so far, and the last error.

    `refusal` is the reason of the last refusal, if it is transient: an expired certificate, which may be renewed.
    `gateway` says whether the other worker is reached through gateways.
    """

    connected: bool = False
    connections: int = 0
    trouble: str = ""
    refusal: NebulaError | None = None
    gateway: bool = False


class Receiver(Protocol):
    """A link, as its carrier calls it: from the carrier's threads, for one connection at a time.

    A carrier of several lanes may deliver frames out of order, but none before those of the greeting.
    """

    def up(self, connection: int) -> None:
        """A new connection is established, the `connection`-th: start the greeting."""

    def message(self, data: bytes) -> None:
        """One complete frame has arrived."""

    def down(self, why: str) -> None:
        """The connection is lost; the carrier is about to reconnect."""

    def lost(self, error: NebulaError) -> None:
        """The carrier has given up: the worker is dead, or it refuses this one permanently."""


class Carrier(Protocol):
    """One worker's transport to one other worker."""

    there: str
    where: str  # the address for messages: of the other worker, or of the gateway before it

    def start(self, receiver: Receiver) -> None:
        """Begin to connect; threads start only here."""

    def send(self, connection: int, header: bytes, chunk: Bytes) -> bool:
        """Queue one frame, once this connection accepts it; False if this connection is lost, even if there is a newer
        one.
        """

    def opened(self) -> None:
        """The greeting on the current connection is complete: a carrier with several lanes may use them all."""

    def drop(self, why: str) -> None:
        """Break the current connection; the carrier reconnects."""

    def pace(self, rate: float) -> None:
        """Report a measured rate in bytes per second, from which deadlines follow."""

    def close(self) -> None:
        """Flush what was sent, and close permanently."""

    def state(self) -> CarrierState:
        """The state of the connection."""


T = TypeVar("T")
BYE = "BYE"
FAIL = "FAIL"


class Link(ABC):
    """One worker's end of the link to one other worker. Every method may be called from any thread.

    Deadlines are in seconds from now. A wait raises `DeadlineError` when its deadline passes, `LinkClosedError` when
    the other worker is lost, and `RemoteFailureError` when it has reported a failure. `on_sent` may be set.
    """

    def __init__(self, inbox: Mailbox) -> None:
        self.here = inbox.here
        self.there = inbox.there
        self.on_sent: OnSent | None = None
        self.epoch: int | None = None
        self._inbox = inbox
        self._counting = threading.Lock()
        self._totals = LinkTotals()

    @abstractmethod
    def send(self, key: Key, array: Payload, *, raw_bytes: int | None = None, size: int | None = None) -> None:
        """Queue a tensor. It does not wait for the network, only for room if the buffer is full.

        The array must not be written to afterwards. `raw_bytes` is its size before a codec (a `Packed` contains it),
        `size` its size if the object has no `nbytes`. A `Packed` is received as a `Packed`.
        """

    def receive(self, key: Key, deadline: float) -> Payload:
        """Wait for the tensor with this key. Each key is received once, in any order.

        The returned array must not be written to either.
        """
        self._check(key, self.there, self.here)
        return self._inbox.take(key, deadline)

    def announce_receive(self, key: Key) -> None:
        """Announce that the tensor with this key will be received, possibly after those of later steps."""
        self._check(key, self.there, self.here)
        self._inbox.announce_receive(key)

    @abstractmethod
    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a control message: a JSON object with a `kind` (HELLO, AGREE ...)."""

    def take(self, kind: str, deadline: float, waited: float = 0.0) -> dict[str, Any]:
        """Wait up to `deadline` seconds for the next control message of this kind. An error adds the seconds for which
        the caller has `waited` before.
        """
        return self._inbox.take_message(kind, deadline, waited)

    def totals(self) -> LinkTotals:
        """Statistics of this end's transmissions."""
        return self._totals

    def begin_session(self, epoch: int) -> None:
        """Begin the session: all workers have agreed on the run's epoch, and processes of other epochs are refused from
        now on.
        """
        self.epoch = epoch

    @abstractmethod
    def fail(self, reason: Mapping[str, Any], *, last: bool = False) -> None:
        """Notify the other worker of a failure and its cause, ahead of queued tensors; or as the `last` message: then
        everything sent before still arrives, and what the other worker sends afterwards is discarded.
        """

    @abstractmethod
    def close(self) -> None:
        """Close gracefully: everything sent before still arrives. Idempotent."""

    def _count_message(self, size: int) -> int:
        """Count one control message; returns its bytes on the wire."""
        total = size + HEADER_BYTES
        self._count(LinkTotals(bytes=total, frames=1))
        return total

    def _count(self, more: LinkTotals) -> None:
        with self._counting:
            self._totals += more

    def _check(self, key: Key, source: str, destination: str) -> None:
        if (key.source, key.destination) != (source, destination):
            raise LocalProtocolError(f"{key} is not a tensor from {source} to {destination}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.here} - {self.there}>"


def receive_each(receivers: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, Callable[[], T]]]:
    """Receive from several workers at the same time, by name, in the order in which messages arrive or links fail: the
    function of each name returns what was received, or raises. So a failure is noticed even if another worker is late.
    """
    if len(receivers) == 1:
        yield from receivers.items()
        return
    arrived: list[tuple[str, Future[T]]] = []
    changed = threading.Condition()

    def receive(name: str) -> None:
        future: Future[T] = Future()
        try:
            future.set_result(receivers[name]())
        except BaseException as failure:
            future.set_exception(failure)
        with changed:
            arrived.append((name, future))
            changed.notify_all()

    for name in receivers:
        threading.Thread(target=partial(receive, name), name="nebula-receive", daemon=True).start()
    for _ in receivers:
        with changed:
            changed.wait_for(lambda: arrived)
            name, future = arrived.pop(0)
        yield name, future.result


def refuse_reserved(message: Mapping[str, Any]) -> None:
    """Refuse message kinds that links reserve for themselves, and unregistered ones."""
    if message.get("kind") in (BYE, FAIL):
        raise LocalProtocolError(f"cannot post {message['kind']}", mend="call fail(reason) or close()")
    check_outgoing_message(message)


def closed_by_error(there: str) -> NebulaError:
    """The error for a link that the other worker has closed gracefully."""
    return LinkClosedError(
        f"worker '{there}' has closed its link",
        why="its script has ended, or it left the run before this worker",
        mend="call fit, save and get_weights in every process, not only where nb.here().lead is true\n"
        f"or check the output of '{there}': it has exited",
    )


def closed_here_error(here: str, there: str) -> NebulaError:
    """The error for a link that this worker itself has closed."""
    return LinkClosedError(f"worker '{here}' has closed its link to '{there}'", mend="send and receive before close()")


def lost_error(there: str, why: str) -> NebulaError:
    """The error for a worker that was lost without closing its link."""
    return LinkClosedError(
        f"worker '{there}' is gone", why=why, mend=f"check the output of '{there}': its process has exited"
    )


def absent_error(there: str, carrier: Carrier, seconds: float, why: str) -> NebulaError:
    """The error for a worker that has never connected; with gateways, that of either cluster may be missing."""
    at, gateway = f"--config clusters.yaml --cluster {cluster_of(there)}", carrier.state().gateway
    return DeadlineError(
        f"worker '{there}' did not connect within {round(seconds, 1):g} s",
        where=carrier.where,
        why=why,
        mend=f"start it in its cluster: whale-nebula run {at} ...\n"
        + (f"start its gateway, and that of this cluster: whale-nebula gateway {at}\n" if gateway else "")
        + "if it is running, check its output, and its address under 'clusters' in the config\n"
        "if its certificate was refused, the reason is above\n"
        "or increase 'patience' in the config",
    )


def silent_error(there: str, carrier: Carrier, seconds: float, why: str) -> NebulaError:
    """The error for a connected worker from which nothing was received within the patience."""
    return DeadlineError(
        f"no message from worker '{there}' for {round(seconds, 1):g} s",
        where=carrier.where,
        why=why,
        mend="check the network and the host of that worker, or increase 'patience' in the config",
    )


_MAX_MEND_LINES = 16  # lines of another worker's advice
_SHARED_ERRORS = (InputMismatchError, PlanMismatchError, LinkClosedError, RemoteFailureError)


def failed_error(there: str, reason: object) -> NebulaError:
    """The error for a worker that has reported its failure.

    A failure that concerns several workers (they differ, or another one is lost) has the same text at each of them. The
    text comes from the other worker: it is escaped and truncated, and its advice is marked as that worker's.
    """
    fields = reason if isinstance(reason, Mapping) else {}
    escaped = {part: escape_foreign_text(fields[part]) for part in ("code", "what", "where") if fields.get(part)}
    shared_class = next((kind for kind in _SHARED_ERRORS if kind.code == escaped.get("code")), None)
    what = escaped.get("what", "no reason given")
    mend_lines = escape_foreign_text(fields.get("mend") or "", lines=True).splitlines()[:_MAX_MEND_LINES]
    error = (shared_class or RemoteFailureError)(
        what if shared_class else f"worker '{there}' failed: {what}",
        where=escaped.get("where"),
        why=escape_foreign_text(" ".join(str(fields.get("why") or "").split())),
        mend="\n".join(f"worker '{there}' suggests: {line}" for line in mend_lines),
    )
    if isinstance(error, RemoteFailureError):
        error.cause = escaped.get("code", "")
    return error


_MAX_DAMAGES = 8  # of one frame; at the next the link gives up


class FaultPolicy:
    """Policy on invalid frames: whether reconnecting is worthwhile. Damage may be random, so it is tolerated
    `_MAX_DAMAGES` times at the same position, and other faults `max_faults` times.
    """

    def __init__(self, max_faults: int = 1) -> None:
        self._limits = {"damage": _MAX_DAMAGES, "fault": max_faults}
        self._position: int | None = None
        self._counts = {"damage": 0, "fault": 0}

    def should_give_up(self, error: NebulaError, received: int) -> bool:
        """Count one more error after `received` valid frames; returns whether reconnecting is pointless.

        >>> from whale_nebula.errors import RemoteProtocolError
        >>> faults = FaultPolicy()
        >>> [faults.should_give_up(RemoteProtocolError("no"), at) for at in (3, 7, 7)]
        [False, False, True]
        """
        if received != self._position:
            self._position, self._counts = received, dict.fromkeys(self._counts, 0)
        kind = "damage" if isinstance(error, DamagedFrameError) else "fault"
        self._counts[kind] += 1
        return self._counts[kind] > self._limits[kind]
