"""Links inside one process over emulated WAN links: full duplex, with rate and delay.

A tensor is passed by reference. Its times on a real WAN link are computed: when its last byte leaves (after everything
sent before it over the same WAN link), and when that byte arrives. The receiver waits until then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from whale_nebula.config.schema import Line
from whale_nebula.errors import LocalProtocolError
from whale_nebula.transport.base import (
    BYE,
    FAIL,
    Link,
    closed_by_error,
    closed_here_error,
    failed_error,
    refuse_reserved,
)
from whale_nebula.transport.deadlines import Clock, MonotonicClock
from whale_nebula.transport.mailbox import Mailbox
from whale_nebula.transport.protocol import Key, LinkTotals, Packed, Payload, check_packed
from whale_nebula.wire.frame import count_frames, count_wire_bytes
from whale_nebula.wire.message import decode_message, encode_message
from whale_nebula.wire.tensor import find_dtype_code


class TransmissionTimes(NamedTuple):
    """Times of a message on an emulated WAN link: when its first byte enters, when its last byte leaves, and when that
    byte arrives.
    """

    start: float
    sent_at: float
    due: float


class EmulatedLine:
    """One direction of a WAN link between two clusters; all workers of these clusters share it."""

    def __init__(self, rate: float | None, delay: float, clock: Clock) -> None:
        self._seconds_per_byte = 8.0 / rate if rate else 0.0
        self._delay = delay
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def occupy(self, size: int, *, overtakes: bool = False) -> TransmissionTimes:
        """Occupy the WAN link while these bytes are sent: after everything before them, unless this `overtakes` it."""
        with self._lock:
            now = self._clock.now()
            start = now if overtakes else max(now, self._free_at)
            sent_at = start + size * self._seconds_per_byte
            self._free_at = max(sent_at, self._free_at)
            return TransmissionTimes(start, sent_at, sent_at + self._delay)


class MemoryLink(Link):
    """One worker's end of a link inside this process."""

    def __init__(self, inbox: Mailbox, outbox: Mailbox, line: EmulatedLine) -> None:
        super().__init__(inbox)
        self._outbox = outbox
        self._line = line

    def send(self, key: Key, array: Payload, *, raw_bytes: int | None = None, size: int | None = None) -> None:
        """Queue a tensor; never blocks. `size` is for objects that have no `nbytes`."""
        self._check(key, self.here, self.there)
        self._inbox.check_open()
        size = _check_size(array, size)
        raw = array.raw_bytes if raw_bytes is None and isinstance(array, Packed) else raw_bytes
        total = count_wire_bytes(size)
        self._count(LinkTotals(size, total, size if raw is None else raw, count_frames(size)))
        times = self._line.occupy(total)
        self._outbox.put(key, array, times.due)
        if self.on_sent is not None:
            self.on_sent(key, total, times.start, times.sent_at)

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a control message; the other side receives a copy, as over any link."""
        refuse_reserved(message)
        self._inbox.check_open()
        data = encode_message(message)
        self._outbox.put_message(decode_message(data), self._line.occupy(self._count_message(len(data))).due)

    def fail(self, reason: Mapping[str, Any], *, last: bool = False) -> None:
        """Notify the other worker of a failure and its cause, ahead of queued tensors unless it is `last`."""
        data = encode_message({"kind": FAIL, "reason": dict(reason), "last": last})
        due = self._line.occupy(self._count_message(len(data)), overtakes=not last).due
        received = decode_message(data)["reason"]
        self._outbox.end(lambda: failed_error(self.here, received), due=due, at_once=not last, takes=last)

    def close(self) -> None:
        """Close gracefully: everything sent before still arrives. Idempotent."""
        if self._inbox.close(lambda: closed_here_error(self.here, self.there)):
            due = self._line.occupy(self._count_message(len(encode_message({"kind": BYE})))).due
            self._outbox.end(lambda: closed_by_error(self.here), due=due)


class MemoryNetwork:
    """All links of one process; `lines` are the WAN links between clusters, in each direction. Others are unlimited.

    >>> network = MemoryNetwork()
    >>> here = network.link("gpu/0", "npu/0", "gpu", "npu")
    >>> there = network.link("npu/0", "gpu/0", "npu", "gpu")
    >>> here.post({"kind": "PING", "last": False})
    >>> there.take("PING", deadline=1.0)
    {'kind': 'PING', 'last': False}
    """

    def __init__(self, lines: Mapping[tuple[str, str], Line] | None = None, *, clock: Clock | None = None) -> None:
        self._specs = dict(lines or {})
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], EmulatedLine] = {}
        self._mailboxes: dict[tuple[str, str], Mailbox] = {}

    def link(self, source: str, destination: str, source_cluster: str, destination_cluster: str) -> MemoryLink:
        """The end of worker `source` of its link to worker `destination`."""
        if source == destination:
            raise LocalProtocolError(f"worker '{source}' cannot have a link to itself")
        with self._lock:
            inbox = self._mailbox(here=source, there=destination)
            outbox = self._mailbox(here=destination, there=source)
            return MemoryLink(inbox, outbox, self._line(source_cluster, destination_cluster))

    def _mailbox(self, here: str, there: str) -> Mailbox:
        if (here, there) not in self._mailboxes:
            self._mailboxes[here, there] = Mailbox(here, there, clock=self._clock)
        return self._mailboxes[here, there]

    def _line(self, source: str, destination: str) -> EmulatedLine:
        """One object for each ordered pair of clusters: the two directions are independent."""
        if (source, destination) not in self._lines:
            line = self._specs.get((source, destination)) or self._specs.get((destination, source))
            if line is None or source == destination:
                line = Line()
            self._lines[source, destination] = EmulatedLine(line.rate, line.delay, self._clock)
        return self._lines[source, destination]


def _check_size(array: Payload, size: int | None) -> int:
    """The size of a payload, after the checks that a real link makes."""
    if isinstance(array, Packed):
        return check_packed(array).nbytes
    dtype = getattr(array, "dtype", None)
    if dtype is not None:
        find_dtype_code(str(getattr(dtype, "name", dtype)))
    size = getattr(array, "nbytes", None) if size is None else size
    if size is None:
        raise LocalProtocolError(f"the size of a {type(array).__name__} is unknown", mend="pass size=")
    return int(size)
