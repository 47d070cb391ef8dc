"""A link over a connected stream socket between two processes: one thread reads it, one writes it.

The reader puts the bytes of a tensor straight into the array that will be handed out; the writer sends the
chunks of an array from where they lie. So an array must not be changed once it was sent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from whale_nebula.errors import NebulaError, RemoteProtocolError
from whale_nebula.transport.base import closed_here, lost_error
from whale_nebula.transport.framed import ExpectKey, FramedEnd
from whale_nebula.transport.outbox import Outbox, Parcel
from whale_nebula.wire.assembly import FrameDecoder
from whale_nebula.wire.conversation import BUDGET_BYTES
from whale_nebula.wire.frame import HEADER_BYTES, Header, Kind, checksum, chunks, pack

PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 5.0
_KERNEL_BUFFER = 4 << 20
_SCRATCH_BYTES = 1 << 16


class SocketLink(FramedEnd):
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
        super().__init__(here, there, workers, Outbox(budget), expect=expect, patience=patience)
        self._grace = grace
        self._socket = _tune_socket(connection)
        self._decoder = FrameDecoder(self._bound)
        self._sequence = 0
        self._reader = threading.Thread(target=self._read, name=f"nebula-read-{there}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"nebula-write-{there}", daemon=True)
        self._reader.start()
        self._writer.start()

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

    # The writer.

    def _write(self) -> None:
        try:
            while (parcel := self._outbox.get()) is not None:
                self._write_parcel(parcel)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._inbox.end(partial(lost_error, self.there, f"writing to it failed: {error}"))
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
            self._inbox.end(partial(lost_error, self.there, "the connection ended without a farewell"))
        except RemoteProtocolError as error:
            self._refuse(error)
        except OSError as error:
            self._inbox.end(partial(lost_error, self.there, f"reading from it failed: {error}"))
        finally:
            self._outbox.finish()

    def _read_events(self) -> None:
        while count := self._socket.recv_into(self._decoder.room(), 0, socket.MSG_WAITALL):
            for event in self._decoder.filled(count):
                self._check_ends(event.header)
                self._arrived(event)

    def _refuse(self, error: NebulaError) -> None:
        """The stream cannot be understood from here on: say so to both sides, and let the rest run out."""
        super()._refuse(error)
        scratch = bytearray(_SCRATCH_BYTES)
        with contextlib.suppress(OSError):
            while self._socket.recv_into(scratch):
                pass

    def _check_ends(self, header: Header) -> None:
        super()._check_ends(header)
        if header.epoch:
            raise RemoteProtocolError(f"a frame of epoch {header.epoch}: a link over a socket has none")


def _tune_socket(connection: socket.socket) -> socket.socket:
    """Blocking, with room for a few chunks in the kernel, and without waiting to fill packets."""
    connection.setblocking(True)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _KERNEL_BUFFER)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
