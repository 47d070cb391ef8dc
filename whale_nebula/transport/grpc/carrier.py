"""The common part of the dialling and the accepting side of a gRPC carrier: it holds the current connection."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from functools import partial

from whale_nebula.errors import NebulaError, TransportError
from whale_nebula.transport.base import CarrierState, Receiver, lost_error
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.connection import Connection, Lane, describe_error
from whale_nebula.transport.grpc.listener import FrameHandler, StreamRequest
from whale_nebula.transport.grpc.options import REFUSALS_OF_DEAD_PROCESS, REFUSED_TWICE, probe_address
from whale_nebula.wire.tensor import Bytes

_LOG = logging.getLogger("whale_nebula.transport")
_REPLACED = "another connection has replaced it"
_KEEPER_SECONDS = 0.5  # the thread holds no resources by then: one that still probes an address is abandoned


class GrpcCarrier(ABC):
    """One worker's transport to another over gRPC. A new connection replaces the previous one.

    A separate thread (`_maintain_connection` of the subclass) opens connections or supervises them.
    """

    def __init__(self, here: str, there: str, where: str, deadlines: Deadlines) -> None:
        self.here = here
        self.there = there
        self.where = where
        self._deadlines = deadlines
        self._link_lock = threading.RLock()  # one call into the link at a time, and only for the current connection
        self._changed = threading.Condition()
        self._receiver: Receiver | None = None
        self._connection: Connection | None = None
        self._opening: Lane | None = None  # the lane of an attempt to connect
        self._closed = False
        self._rate: float | None = None
        self._changed_at = time.monotonic()
        self._connections = 0
        self._was_connected = False  # whether the other worker has ever authenticated
        self._refusals = 0
        self._trouble = ""
        self._refusal: NebulaError | None = None
        self._uses_gateway = False
        self._keeper_thread = threading.Thread(target=self._run, name=f"nebula-keep-{there}", daemon=True)

    def start(self, receiver: Receiver) -> None:
        """Begin to connect."""
        self._receiver = receiver
        self._keeper_thread.start()

    def send(self, connection: int, header: bytes, chunk: Bytes) -> bool:
        """Join header and chunk, the only copy made here, and queue the frame."""
        with self._link_lock:
            current = self._connection if connection == self._connections else None
        if current is None:
            return False
        frame = b"".join((header, chunk.data)) if chunk.size else bytes(header)
        return current.send(frame)

    def opened(self) -> None:
        """The greeting is complete: all lanes may be used."""
        with self._link_lock:
            if self._connection is not None:
                self._trouble, self._refusal, self._was_connected = "", None, True
                self._connection.was_greeted = True
                self._connection.opened.set()

    def drop(self, why: str) -> None:
        """Break the current connection; the carrier reconnects."""
        connection = self._connection
        if connection is not None:
            connection.end(why)

    def pace(self, rate: float) -> None:
        """Report a measured rate; new connections derive the timeout of their pings from it."""
        self._rate = rate

    def close(self) -> None:
        """Flush what was sent, and close."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        connection = self._connection
        if connection is not None:
            connection.finish()
            connection.wait_for_end(self._deadlines.grace)
            connection.end("closed")
        if (opening := self._opening) is not None:
            opening.end("closed")
        if self._keeper_thread.ident is not None and self._keeper_thread is not threading.current_thread():
            self._keeper_thread.join(_KEEPER_SECONDS)

    def state(self) -> CarrierState:
        """The state of the connection."""
        connected, gateway = self._connection is not None, self._uses_gateway
        return CarrierState(connected, self._connections, self._trouble, self._refusal, gateway)

    @abstractmethod
    def _maintain_connection(self) -> None:
        """Maintain the connection until the carrier is closed."""

    def _run(self) -> None:
        try:
            self._maintain_connection()
        except NebulaError as error:
            self._give_up(error)
        except Exception as error:
            _LOG.exception("the carrier to %s has failed", self.there)
            self._give_up(lost_error(self.there, f"the carrier of this side has failed: {describe_error(error)}"))

    def _adopt(self, connection: Connection, trouble: str = "") -> None:
        """Replace the connection by a new one; `trouble` is a problem on the path beyond it, or ""."""
        while not self._make_current(connection, trouble):
            before = self._connection
            if before is not None:
                before.end(_REPLACED)
                self._forget(before, _REPLACED)  # another thread may be ending it, before it has notified the link
        connection.adopted.set()
        with self._changed:
            self._changed.notify_all()
        connection.on_end(lambda why: self._forget(connection, why))

    def _make_current(self, connection: Connection, trouble: str) -> bool:
        """Make a connection the current one; False if another one is still active. A late one is ended."""
        with self._link_lock:
            if self._closed or self._receiver is None:
                connection.end("this side has closed the link")
                return True
            if self._connection is not None:
                return False
            self._connection, self._changed_at, self._trouble = connection, time.monotonic(), trouble
            self._connections += 1
            self._refusals = 0
            self._receiver.up(self._connections)
            return True

    def _forget(self, connection: Connection, why: str) -> None:
        with self._link_lock:
            if self._connection is not connection or self._receiver is None:
                return
            self._connection, self._changed_at, self._trouble = None, time.monotonic(), why
            if not self._closed:
                _LOG.info("the connection between %s and %s is lost: %s", self.here, self.there, why)
            self._receiver.down(why)
        with self._changed:
            self._changed.notify_all()

    def _receive(self, connection: Connection, frame: bytes) -> None:
        """Pass on one frame of one connection, in the thread that reads it."""
        with self._link_lock:
            if self._connection is connection and self._receiver is not None:
                self._receiver.message(frame)

    def _give_up(self, error: NebulaError) -> None:
        with self._link_lock:
            if self._receiver is not None and not self._closed:
                self._receiver.lost(error)

    def _wait(self, seconds: float, *, unless_connected: bool | None = None) -> bool:
        """Wait this long, or until it is closed or connected (or disconnected); returns whether to continue."""

        def woken() -> bool:
            return self._closed or unless_connected == (self._connection is not None)

        with self._changed:
            self._changed.wait_for(woken, seconds)
            return not self._closed

    def _count_refusal(self) -> NebulaError | None:
        """Count consecutive refusals of the address; returns an error once they mean that a worker that was connected
        before is dead. A refusal may also come from another process at that address, whose worker is being restarted.
        """
        self._refusals += 1
        if not self._was_connected or self._refusals < REFUSALS_OF_DEAD_PROCESS:
            return None
        return lost_error(self.there, f"its address {self.where} {REFUSED_TWICE}")


_PROMPT_SECONDS = 0.3  # within which a live worker has usually dialled again


class AwaitingCarrier(GrpcCarrier):
    """Carrier that accepts connections. `where` is the other worker's own address, if any, which is probed once it is
    lost.

    The result counts only if the address was ever reachable from here: one behind a firewall refuses every probe.
    """

    def __init__(self, here: str, there: str, where: str, *, deadlines: Deadlines) -> None:
        super().__init__(here, there, where, deadlines)
        self._was_open = False
        self._trouble = "it has not connected yet"

    def accept_stream(self, request: StreamRequest, lane: Lane) -> FrameHandler:
        """Accept an incoming stream, whose dialler was authenticated as the other worker."""
        if self._closed or self._receiver is None:
            raise TransportError(f"worker '{self.here}' is {'closing its link' if self._closed else 'not ready yet'}")
        if request.lane == 0:
            connection = Connection(request.connection)
            connection.add(0, lane)
            # The link greets at once: its frames wait in the lane until gRPC requests them.
            self._adopt(connection)
        else:
            current = self._connection
            if current is None or current.name != request.connection or not current.add(request.lane, lane):
                raise TransportError("the connection of this lane no longer exists")
            connection = current
        connection.hold_reading(request.lane, lane)
        return partial(self._receive, connection)

    def _maintain_connection(self) -> None:
        attempt = 0
        while not self._closed:
            if self._connection is not None:
                attempt = 0
                self._was_open = self._was_open or (self.where != "" and self._is_port_open())
                self._wait(self._deadlines.check_interval, unless_connected=False)
            else:
                self._wait(_PROMPT_SECONDS + self._deadlines.draw_retry_pause(attempt), unless_connected=True)
                attempt += 1
                if self._was_open and self._connection is None:
                    self._is_port_open()

    def _is_port_open(self) -> bool:
        """Whether the other worker's own port is still open; raises once it has refused twice."""
        probe = probe_address(self.where, self._deadlines.connect)
        if probe.outcome != "refused":
            self._refusals = 0
            return True
        worker_death = self._count_refusal()
        if worker_death is not None and self._connection is None:
            raise worker_death
        return False
