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

_MOST = 64 << 10


def encode_control(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a frame.

    >>> read(encode_control({"kind": "KEPT", "seq": 99}))
    {'kind': 'KEPT', 'seq': 99}
    """
    payload = np.frombuffer(encode_message(message), np.uint8)
    [(header, chunk)] = split_payload(build_message_header(payload.size), payload)
    return pack_header(header, compute_checksum(chunk)) + chunk.tobytes()


def read(frame: bytes) -> dict[str, Any]:
    """Decode the message in a frame; anything else is a protocol error of the other side."""
    if not HEADER_BYTES <= len(frame) <= _MOST:
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


_WAITING = 256  # messages; heads are cumulative, so an old one may be lost
_STREAMS = 4  # of one other gateway; it needs one, or two if both dial
_ADOPTIONS, _ADOPTIONS_A_SECOND = 32, 0.5  # of new streams
_WORDS, _WORDS_A_SECOND = 1024, 1.0  # of messages
_PAUSE_SECONDS = 0.25
_DIGITS = 10  # limit for the number of a worker
_ENDED = "this gateway has stopped"


class ControlStream:
    """One stream between two gateways, with a queue of messages and a thread that sends them."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._changed = threading.Condition()
        self._words: deque[bytes] = deque(maxlen=_WAITING)
        threading.Thread(target=self._send, name="nebula-control", daemon=True).start()

    def say(self, frame: bytes) -> None:
        """Queue a message if there is room."""
        with self._changed:
            self._words.append(frame)
            self._changed.notify_all()

    def wake(self) -> None:
        """End the stream."""
        with self._changed:
            self._changed.notify_all()

    def _send(self) -> None:
        while not self.lane.over:
            with self._changed:
                self._changed.wait_for(lambda: self._words or self.lane.over)
                frame = self._words.popleft() if self._words else b""
            if frame:
                self.lane.send(frame)


class ControlStreams:
    """All streams to one other gateway: messages are sent on each of them, and handled once.

    `gone(worker, why)` is called for lost workers of the other side; `noted(action, **fields)` records whether heads
    were stored.
    """

    def __init__(
        self, there: Identity, kept: KeptHeads | None, gone: Callable[[str, str], None], noted: Callable[..., None]
    ) -> None:
        self.there = there
        self._kept, self._gone, self._noted = kept, gone, noted
        self._changed = threading.Condition()
        self._streams: list[ControlStream] = []
        self._of_gone: dict[str, bytes] = {}  # messages about lost workers, by worker
        self._received_ids: deque[str] = deque(maxlen=_WAITING)
        self._last_head: Head | None = None
        self._confirmed = self._denied = -1  # our last heads that the other side has stored, and refused
        self._closed = False
        self._adoptions = TokenBucket(_ADOPTIONS, _ADOPTIONS_A_SECOND)
        self._words = TokenBucket(_WORDS, _WORDS_A_SECOND)

    @property
    def up(self) -> bool:
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
        if not self._adoptions.take():
            raise TransportError(
                f"too many new streams of {self.there.worker}", why="each is recorded in the audit log"
            )

    def adopt(self, lane: Lane, over: Callable[[], None] = lambda: None) -> None:
        """Add a stream that either gateway has dialled; `over` is called when it ends.

        Beyond the limit the oldest one is ended.
        """
        stream = ControlStream(lane)

        def drop(why: str) -> None:
            self._drop(stream)
            over()

        lane.on_end = drop
        with self._changed:
            closed = self._closed
            self._streams += [] if closed else [stream]
            surplus = self._streams[:-_STREAMS]
            words = [_encode_head(self._last_head)] if self._last_head is not None else []
            words += self._of_gone.values()
        if closed:
            lane.end(_ENDED)
        for each in surplus:
            each.lane.end("newer streams have replaced it")
        for frame in words:
            stream.say(frame)
        if lane.over:
            drop(lane.why)

    def send_head(self, head: Head) -> None:
        """Send a head of our log to be stored by the other side."""
        with self._changed:
            self._last_head = head
        self._say(_encode_head(head))

    def send_gone(self, worker: str, why: str) -> None:
        """Announce that one of our workers is lost: now, and on every later stream until the worker is back."""
        message = {"kind": "GONE", "id": secrets.token_hex(8), "worker": worker, "why": why}
        with self._changed:
            self._of_gone[worker] = encode_control(message)
        self._say(encode_control(message))

    def unsay(self, worker: str) -> None:
        """Withdraw the announcement for a worker that is back."""
        with self._changed:
            self._of_gone.pop(worker, None)

    def wait_kept(self, seconds: float) -> bool:
        """Wait at most `seconds` until the other gateway has stored the last head of our log."""
        with self._changed:
            wanted = self._last_head.seq if self._last_head is not None else -1
            self._changed.wait_for(lambda: max(self._confirmed, self._denied) >= wanted or not self._streams, seconds)
            return self._confirmed >= wanted

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
        stream.wake()
        with self._changed:
            if stream in self._streams:
                self._streams.remove(stream)
            self._changed.notify_all()

    def _say(self, frame: bytes) -> None:
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.say(frame)

    def receive(self, frame: bytes) -> None:
        """Handle a message of the other gateway, at a limited rate, as most cause a disk write."""
        while not (self._words.take() or self._closed):
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _PAUSE_SECONDS)
        message = read(frame)
        match message:
            case {"kind": "HEAD", "head": dict(head)}:
                self._keep(head)
            case {"kind": "KEPT", "seq": int(seq)}:
                with self._changed:
                    self._confirmed = max(self._confirmed, seq)
                    self._changed.notify_all()
            case {"kind": "REFUSED", "seq": int(seq), "why": str(why)}:
                with self._changed:
                    self._denied = max(self._denied, seq)
                    self._changed.notify_all()
                self._noted("refused", actor=self.there.uri, log_seq=seq, reason=escape_foreign_text(why))
            case {"kind": "GONE", "id": str(number), "worker": str(worker), "why": str(why)}:
                cluster, _, number_there = worker.rpartition("/")
                digits = number_there.isascii() and number_there.isdecimal() and len(number_there) < _DIGITS
                if cluster != self.there.cluster or not digits:
                    raise RemoteProtocolError(f"{self.there.worker} reports {worker[:60]!r}, which is not its worker")
                with self._changed:  # it may have arrived over another stream
                    new = number[:16] not in self._received_ids
                    self._received_ids.append(number[:16])
                if new:
                    self._gone(worker, escape_foreign_text(why))
            case _:
                raise RemoteProtocolError(f"unknown message between gateways: {message['kind'][:20]!r}")

    def _keep(self, content: dict[str, Any]) -> None:
        """Store a head; a log that was rolled back is recorded with a warning, and the stream continues."""
        if self._kept is None:
            return
        head = Head.from_dict(content)
        try:
            new = self._kept.keep(head, self.there)
        except (AuditError, IdentityError) as error:
            reason = f"{error.what}: {error.why}" if error.why else error.what
            self._noted("not kept", actor=self.there.uri, decision="deny", reason=reason)
            self._say(encode_control({"kind": "REFUSED", "seq": head.seq, "why": reason}))
            return
        if new:
            self._noted("kept", actor=self.there.uri, log_seq=head.seq, digest=head.digest)
        self._say(encode_control({"kind": "KEPT", "seq": head.seq}))


def _encode_head(head: Head) -> bytes:
    return encode_control({"kind": "HEAD", "head": head._asdict()})
