"""A link over a connected stream socket between two processes: one thread reads it, one writes it.

The reader puts the bytes of a tensor straight into the array that will be handed out; the writer sends the
chunks of an array from where they lie. So an array must not be changed once it was sent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.transport.address import Roster
from whale_nebula.transport.base import (
    BYE,
    FAIL,
    LinkEnd,
    closed_by,
    closed_here,
    failed,
    lost,
    refuse_reserved,
)
from whale_nebula.transport.mailbox import Mailbox
from whale_nebula.transport.outbox import Outbox, Parcel
from whale_nebula.transport.protocol import Key, Payload
from whale_nebula.wire.decoder import Bound, FrameDecoder, MessageArrived
from whale_nebula.wire.frame import HEADER_BYTES, Header, Kind, checksum, chunks, pack
from whale_nebula.wire.message import encode_message
from whale_nebula.wire.tensor import array_bytes, dtype_code

BUDGET_BYTES = 64 << 20
PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 5.0
_KERNEL_BUFFER = 4 << 20
_SCRATCH_BYTES = 1 << 16
_UINT8 = dtype_code("uint8")

ExpectKey: TypeAlias = Callable[[Key], Bound | None]


class SocketLink(LinkEnd):
    """One worker's end of a link to a worker in another process.

    `workers` are all workers of the run. `expect` says what the plan allows for a key (None: nobody expects
    it); `budget` how many bytes may wait for the line before `send` blocks, and `patience` for how long it
    then may.
    """

    def __init__(
        self,
        connection: socket.socket,
        here: str,
        there: str,
        workers: Iterable[str],
        *,
        expect: ExpectKey | None = None,
        budget: int = BUDGET_BYTES,
        patience: float = PATIENCE_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        super().__init__(Mailbox(here, there, fault=RemoteProtocolError))
        self._roster = Roster(workers)
        self._ends = self._roster.number(there), self._roster.number(here)
        self._expect = expect
        self._patience = patience
        self._grace = grace
        self._socket = _tuned(connection)
        self._decoder = FrameDecoder(self._bound)
        self._outbox = Outbox(budget)
        self._sequence = 0
        self._farewell = self._parcel({"kind": BYE})
        self._reader = threading.Thread(target=self._read, name=f"nebula-read-{there}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"nebula-write-{there}", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(
        self, key: Key, array: Payload, *, raw_bytes: int | None = None, size: int | None = None
    ) -> None:
        """Queue a tensor for the writer. `size` is not needed here: the array has one."""
        self._check(key, self.here, self.there)
        array = np.asarray(array)
        header = self._roster.header(key)._replace(dtype=dtype_code(array.dtype.name), dims=array.shape)
        self._put(Parcel(header, array_bytes(array)))
        self._tally.tensor(array.nbytes, raw_bytes)

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a control message for the writer."""
        refuse_reserved(message)
        parcel = self._parcel(message)
        self._put(parcel)
        self._tally.message(parcel.payload.size)

    def fail(self, reason: Mapping[str, Any]) -> None:
        """Tell the other worker that this one failed and why, before everything that is queued."""
        parcel = self._parcel({"kind": FAIL, "reason": dict(reason)})
        if self._outbox.put_urgent(parcel):
            self._tally.message(parcel.payload.size)

    def close(self) -> None:
        """Send what is queued and a farewell, wait for the other side's, and end both threads."""
        if not self._inbox.close(lambda: closed_here(self.here, self.there)):
            return
        self._say_farewell()
        self._drain()
        self._reader.join(self._grace)
        self._outbox.stop()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # frees a thread that is still inside recv or send
        self._writer.join(self._grace)
        self._reader.join(self._grace)
        self._socket.close()

    def _drain(self) -> None:
        """Let the writer finish as long as it gets on."""
        before = -1
        while self._writer.is_alive() and self._outbox.written != before:
            before = self._outbox.written
            self._writer.join(self._grace)

    def _say_farewell(self) -> None:
        if self._outbox.finish(self._farewell):
            self._tally.message(self._farewell.payload.size)

    def _put(self, parcel: Parcel) -> None:
        self._inbox.check_open()
        pack(
            next(iter(chunks(parcel.header, parcel.payload)))[0], 0
        )  # its faults belong to the caller, not the writer
        if not self._outbox.put(parcel, self._patience, self.there):
            self._inbox.check_open()

    def _parcel(self, message: Mapping[str, Any]) -> Parcel:
        payload = np.frombuffer(encode_message(message), np.uint8)
        there, here = self._ends
        header = Header(Kind.CONTROL, source=here, destination=there, dtype=_UINT8, dims=(payload.size,))
        return Parcel(header, payload)

    # The writer.

    def _write(self) -> None:
        try:
            while (parcel := self._outbox.get()) is not None:
                self._write_parcel(parcel)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._inbox.end(partial(lost, self.there, f"writing to it failed: {error}"))
        finally:
            self._outbox.stop()

    def _write_parcel(self, parcel: Parcel) -> None:
        began = time.monotonic()
        for header, chunk in chunks(parcel.header, parcel.payload):
            while (urgent := self._outbox.get_urgent()) is not None:
                self._write_parcel(urgent)
            self._write_frame(header, chunk)
            self._outbox.done(HEADER_BYTES + chunk.size)
        if self.on_sent is not None and parcel.header.kind != Kind.CONTROL:
            self.on_sent(self._roster.key(parcel.header), parcel.size, began, time.monotonic())

    def _write_frame(self, header: Header, chunk: Any) -> None:
        head = pack(header._replace(sequence=self._sequence), checksum(chunk))
        self._sequence += 1
        sent = self._socket.sendmsg((head, chunk))
        if sent < len(head):
            self._socket.sendall(head[sent:])
            sent = len(head)
        if sent < len(head) + chunk.size:
            self._socket.sendall(chunk[sent - len(head) :])

    # The reader.

    def _read(self) -> None:
        try:
            self._read_events()
            self._inbox.end(partial(lost, self.there, "the connection ended without a farewell"))
        except RemoteProtocolError as error:
            self._refuse(error)
        except OSError as error:
            self._inbox.end(partial(lost, self.there, f"reading from it failed: {error}"))
        finally:
            self._outbox.finish()

    def _read_events(self) -> None:
        while count := self._socket.recv_into(self._decoder.room(), 0, socket.MSG_WAITALL):
            for event in self._decoder.filled(count):
                self._check_ends(event.header)
                if isinstance(event, MessageArrived):
                    self._hear(event.message)
                else:
                    self._inbox.put(self._roster.key(event.header), event.array)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == BYE:
            self._inbox.end(partial(closed_by, self.there))
            self._say_farewell()
        elif message["kind"] == FAIL:
            self._inbox.end(partial(failed, self.there, message.get("reason")), at_once=True)
        else:
            self._inbox.put_message(message)

    def _refuse(self, error: RemoteProtocolError) -> None:
        """The stream cannot be understood from here on: say so to both sides, and let the rest run out."""
        self._inbox.end(lambda: error.with_traceback(None), at_once=True)
        self.fail({"what": f"it could not understand what '{self.there}' sent", "why": error.what})
        self._outbox.finish()
        scratch = bytearray(_SCRATCH_BYTES)
        with contextlib.suppress(OSError):
            while self._socket.recv_into(scratch):
                pass

    def _bound(self, header: Header) -> Bound | None:
        """What the plan allows for a tensor that begins: asked by the decoder before it allocates."""
        self._check_ends(header)
        if self._expect is None:
            return None
        key = self._roster.key(header)
        bound = self._expect(key)
        if bound is None:
            raise RemoteProtocolError(f"{key} came, which the plan does not know")
        return bound

    def _check_ends(self, header: Header) -> None:
        if (header.source, header.destination) != self._ends or header.epoch:
            raise RemoteProtocolError(
                f"a frame from worker {header.source} to worker {header.destination}, epoch {header.epoch}, "
                f"on the link from {self.there} to {self.here}"
            )


def _tuned(connection: socket.socket) -> socket.socket:
    """Blocking, with room for a few chunks in the kernel, and without waiting to fill packets."""
    connection.setblocking(True)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _KERNEL_BUFFER)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
