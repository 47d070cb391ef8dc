"""The control stream between two gateways: heads of their audit logs, and notices about dead workers.

A gateway that has the other's address dials, and redials; if both have addresses, there are two streams.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whale_nebula.errors import AuditError, IdentityError, RemoteProtocolError, TransportError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security.audit import Head, KeptHeads
from whale_nebula.security.identity import Identity
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import HEADER_BYTES, Kind, compute_checksum, pack_header, split_payload, unpack_header
from whale_nebula.wire.message import build_message_header, decode_message, encode_message

_MAX_BYTES = 64 << 10


def encode_control(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a frame.

    >>> decode_control(encode_control({"kind": "KEPT", "seq": 99}))
    {'kind': 'KEPT', 'seq': 99}
    """
    payload = np.frombuffer(encode_message(message), np.uint8)
    [(header, chunk)] = split_payload(build_message_header(payload.size), payload)
    return pack_header(header, compute_checksum(chunk)) + chunk.tobytes()


def decode_control(frame: bytes) -> dict[str, Any]:
    """Decode the message in a frame; anything else is a protocol error of the other side."""
    if not HEADER_BYTES <= len(frame) <= _MAX_BYTES:
        raise RemoteProtocolError(f"invalid size of a message between gateways: {len(frame)} bytes")
    header, crc = unpack_header(frame[:HEADER_BYTES])
    data = frame[HEADER_BYTES:]
    if (
        header.kind != Kind.CONTROL
        or header.length != len(data)
        or compute_checksum(np.frombuffer(data, np.uint8)) != crc
    ):
        raise RemoteProtocolError("not a message between gateways")
    return decode_message(data)


MAX_CONTROL_STREAMS = 4
"""The most streams of one other gateway; it needs one, or two if both dial."""
_MAX_QUEUED = 256  # messages; heads are cumulative, so an old one may be lost
_STREAM_BURST, _STREAMS_A_SECOND = 32, 0.5
_MESSAGE_BURST, _MESSAGES_A_SECOND = 1024, 1.0
_PAUSE_SECONDS = 0.25
_MAX_DIGITS = 10  # limit for the number of a worker
_ENDED = "this gateway has stopped"


class ControlStream:
    """One stream between two gateways, with a queue of messages and a thread that sends them."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque(maxlen=_MAX_QUEUED)
        threading.Thread(target=self._send, name="nebula-control", daemon=True).start()

    def queue_message(self, frame: bytes) -> None:
        """Queue a message; if the queue is full, the oldest one is dropped."""
        with self._changed:
            self._messages.append(frame)
            self._changed.notify_all()

    def wake_sender(self) -> None:
        """Wake the thread that sends: it ends if the lane is over."""
        with self._changed:
            self._changed.notify_all()

    def _send(self) -> None:
        while not self.lane.is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self.lane.is_over)
                frame = self._messages.popleft() if self._messages else b""
            if frame:
                self.lane.send(frame)


class ControlStreams:
    """All streams to one other gateway: messages are sent on each of them, and handled once.

    `on_lost(worker, why)` is called for lost workers of the other side; `record(action, **fields)` records whether
    heads were stored.
    """

    def __init__(
        self,
        there: Identity,
        stored_heads: KeptHeads | None,
        on_lost: Callable[[str, str], None],
        record: Callable[..., None],
    ) -> None:
        self.there = there
        self._stored_heads, self._on_lost, self._record = stored_heads, on_lost, record
        self._changed = threading.Condition()
        self._streams: list[ControlStream] = []
        self._lost_messages: dict[str, bytes] = {}  # messages about lost workers, by worker
        self._received_ids: deque[str] = deque(maxlen=_MAX_QUEUED)
        self._last_head: Head | None = None
        self._confirmed = self._denied = -1  # our last heads that the other side has stored, and refused
        self._closed = False
        self._stream_bucket = TokenBucket(_STREAM_BURST, _STREAMS_A_SECOND)
        self._message_bucket = TokenBucket(_MESSAGE_BURST, _MESSAGES_A_SECOND)

    @property
    def is_connected(self) -> bool:
        """Whether there is a stream."""
        with self._changed:
            return bool(self._streams)

    @property
    def lanes(self) -> list[Lane]:
        """Its streams."""
        with self._changed:
            return [stream.lane for stream in self._streams]

    def check_rate(self) -> None:
        """Raise if the other gateway opens streams too often, as each is recorded."""
        if not self._stream_bucket.take():
            raise TransportError(
                f"too many new streams of {self.there.worker}", why="each is recorded in the audit log"
            )

    def add_stream(self, lane: Lane, on_end: Callable[[], None] = lambda: None) -> None:
        """Add a stream that either gateway has dialled; `on_end` is called when it ends.

        Beyond the limit the oldest one is ended.
        """
        stream = ControlStream(lane)

        def drop(why: str) -> None:
            self._drop(stream)
            on_end()

        lane.on_end = drop
        with self._changed:
            closed = self._closed
            self._streams += [] if closed else [stream]
            surplus = self._streams[:-MAX_CONTROL_STREAMS]
            messages = [_encode_head(self._last_head)] if self._last_head is not None else []
            messages += self._lost_messages.values()
        if closed:
            lane.end(_ENDED)
        for each in surplus:
            each.lane.end("newer streams have replaced it")
        for frame in messages:
            stream.queue_message(frame)
        if lane.is_over:
            drop(lane.reason)

    def send_head(self, head: Head) -> None:
        """Send a head of our log to be stored by the other side."""
        with self._changed:
            self._last_head = head
        self._send_to_all(_encode_head(head))

    def announce_lost(self, worker: str, why: str) -> None:
        """Announce that one of our workers is lost: now, and on every later stream until the worker is back."""
        message = {"kind": "GONE", "id": secrets.token_hex(8), "worker": worker, "why": why}
        with self._changed:
            self._lost_messages[worker] = encode_control(message)
        self._send_to_all(encode_control(message))

    def withdraw_lost(self, worker: str) -> None:
        """Withdraw the announcement for a worker that is back."""
        with self._changed:
            self._lost_messages.pop(worker, None)

    def wait_head_stored(self, seconds: float) -> bool:
        """Wait at most `seconds` until the other gateway has stored the last head of our log."""
        with self._changed:
            last_seq = self._last_head.seq if self._last_head is not None else -1
            self._changed.wait_for(lambda: max(self._confirmed, self._denied) >= last_seq or not self._streams, seconds)
            return self._confirmed >= last_seq

    def close(self) -> None:
        """End the streams."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.end(_ENDED)

    def end(self, why: str) -> None:
        """Abort the streams, which are dialled again unless this is closed."""
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.lane.end(why)

    def _drop(self, stream: ControlStream) -> None:
        stream.wake_sender()
        with self._changed:
            if stream in self._streams:
                self._streams.remove(stream)
            self._changed.notify_all()

    def _send_to_all(self, frame: bytes) -> None:
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.queue_message(frame)

    def receive(self, frame: bytes) -> None:
        """Handle a message of the other gateway, at a limited rate, as most cause a disk write."""
        while not (self._message_bucket.take() or self._closed):
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _PAUSE_SECONDS)
        message = decode_control(frame)
        match message:
            case {"kind": "HEAD", "head": dict(head)}:
                self._store_head(head)
            case {"kind": "KEPT", "seq": int(seq)}:
                with self._changed:
                    self._confirmed = max(self._confirmed, seq)
                    self._changed.notify_all()
            case {"kind": "REFUSED", "seq": int(seq), "why": str(why)}:
                with self._changed:
                    self._denied = max(self._denied, seq)
                    self._changed.notify_all()
                self._record("refused", actor=self.there.uri, log_seq=seq, reason=escape_foreign_text(why))
            case {"kind": "GONE", "id": str(message_id), "worker": str(worker), "why": str(why)}:
                cluster, _, worker_number = worker.rpartition("/")
                is_number = worker_number.isascii() and worker_number.isdecimal() and len(worker_number) < _MAX_DIGITS
                if cluster != self.there.cluster or not is_number:
                    raise RemoteProtocolError(f"{self.there.worker} reports {worker[:60]!r}, which is not its worker")
                with self._changed:  # it may have arrived over another stream
                    is_new = message_id[:16] not in self._received_ids
                    self._received_ids.append(message_id[:16])
                if is_new:
                    self._on_lost(worker, escape_foreign_text(why))
            case _:
                raise RemoteProtocolError(f"unknown message between gateways: {message['kind'][:20]!r}")

    def _store_head(self, content: dict[str, Any]) -> None:
        """Store a head; a log that was rolled back is recorded with a warning, and the stream continues."""
        if self._stored_heads is None:
            return
        head = Head.from_dict(content)
        try:
            is_new = self._stored_heads.keep(head, self.there)
        except (AuditError, IdentityError) as error:
            reason = f"{error.what}: {error.why}" if error.why else error.what
            self._record("not kept", actor=self.there.uri, decision="deny", reason=reason)
            self._send_to_all(encode_control({"kind": "REFUSED", "seq": head.seq, "why": reason}))
            return
        if is_new:
            self._record("kept", actor=self.there.uri, log_seq=head.seq, digest=head.digest)
        self._send_to_all(encode_control({"kind": "KEPT", "seq": head.seq}))


def _encode_head(head: Head) -> bytes:
    return encode_control({"kind": "HEAD", "head": head._asdict()})
