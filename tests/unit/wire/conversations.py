"""Helpers: pairs of conversations with a connection that can break, and frames of messages and tensors."""

import hmac
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.buffers import Acknowledged, MessageArrived, Packet, TensorArrived
from whale_nebula.wire.conversation import Answer, Conversation, Event, Opened
from whale_nebula.wire.frame import (
    HEADER_BYTES,
    Header,
    Kind,
    compute_checksum,
    pack_header,
    split_payload,
    unpack_header,
)
from whale_nebula.wire.greeting import Greeting
from whale_nebula.wire.message import encode_message
from whale_nebula.wire.tensor import encode_array, find_dtype_code

NAMES = ("gpu/0", "npu/0")
STEP = {"kind": "SESSION", "about": "STEP", "program": 7, "step": 0, "rows": 1, "inputs": {}}
BYE = {"kind": "BYE"}
FAIL = {"kind": "FAIL", "reason": {"what": "it broke"}}


@dataclass
class SharedSecretProver:
    """A prover whose signatures are digests with a secret that both sides know."""

    worker: str
    secret: bytes = b"secret"
    certificate: str = "a certificate"
    verified: list[tuple[str, str]] = field(default_factory=list)

    def sign(self, transcript: bytes) -> bytes:
        return hmac.digest(self.secret, transcript, "sha256")

    def verify(self, certificate: str, signature: bytes, transcript: bytes, worker: str) -> None:
        if not hmac.compare_digest(signature, self.sign(transcript)):
            raise RemoteProtocolError(f"the signature of {worker} is invalid")
        self.verified.append((certificate, worker))

    def check_live(self, certificate: str, worker: str) -> None:
        """Certificates never expire."""


def make_greeting(side: int, **fields: Any) -> Greeting:
    return Greeting(**{"run": "run-1", "worker": NAMES[side], "peer": NAMES[1 - side], **fields})


def make_conversation(side: int, *, proven: bool = False, sealed: bool = False, **options: Any) -> Conversation:
    """One side; `sealed` implies `proven`."""
    prover = SharedSecretProver(NAMES[side]) if proven or sealed else None
    options = {"prover": prover, "sealed": sealed, **options}
    return Conversation(side, 1 - side, options.pop("greeting", make_greeting(side)), **options)


def make_pair(**options: Any) -> tuple[Conversation, Conversation]:
    return make_conversation(0, **options), make_conversation(1, **options)


def read_header(frame: bytes, sealed: bool = False) -> Header:
    return unpack_header(frame[:HEADER_BYTES], sealed=sealed)[0]


def replace_fields(frame: bytes, **fields: Any) -> bytes:
    """A frame with other fields and valid checksums."""
    header = read_header(frame)._replace(**fields)
    payload = np.frombuffer(frame[HEADER_BYTES:], np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale_nebula.wire.frame.find_fault", lambda header, sealed: None)
        return pack_header(header, compute_checksum(payload)) + payload.tobytes()


def join_packet(packet: Packet) -> bytes:
    """A frame as one message."""
    return packet[0] + packet[1].tobytes()


def frame_message(side: int, message: Mapping[str, Any]) -> list[tuple[Header, np.ndarray]]:
    payload = np.frombuffer(encode_message(message), np.uint8)
    header = Header(Kind.CONTROL, source=side, destination=1 - side, dtype=find_dtype_code("uint8"), dims=payload.shape)
    return list(split_payload(header, payload))


def frame_tensor(side: int, array: np.ndarray, **fields: int) -> list[tuple[Header, np.ndarray]]:
    header = Header(
        Kind.SCALAR,
        source=side,
        destination=1 - side,
        program=7,
        dtype=find_dtype_code(array.dtype.name),
        dims=array.shape,
    )
    return list(split_payload(header._replace(**fields), encode_array(array)))


def send_frames(conversation: Conversation, frames: list[tuple[Header, np.ndarray]]) -> list[bytes]:
    """Send the frames of a tensor or message; returns them as bytes."""
    return [join_packet(conversation.build_frame(*frame)) for frame in frames]


def greet(a: Conversation, b: Conversation) -> tuple[list[Event], list[Event]]:
    """Let both greet on a new connection; returns the events of each."""
    hellos = join_packet(a.connect()[0]), join_packet(b.connect()[0])
    (to_b,), (to_a,) = a.receive(hellos[1]), b.receive(hellos[0])
    assert isinstance(to_b, Answer) and isinstance(to_a, Answer)
    return a.receive(join_packet(to_a.packets[0])), b.receive(join_packet(to_b.packets[0]))


def open_pair(*, stepping: bool = False, **options: Any) -> tuple[Conversation, Conversation]:
    """Two sides that have greeted; `stepping`: and announced step 0 of program 7."""
    a, b = make_pair(**options)
    greet(a, b)
    if stepping:
        for side, (here, there) in enumerate(((a, b), (b, a))):
            there.receive(send_frames(here, frame_message(side, STEP))[0])
    return a, b


def disconnect_all(*sides: Conversation) -> None:
    for side in sides:
        side.disconnect()


def read_contents(events: list[Event]) -> Iterator[bytes | dict[str, Any]]:
    """The tensors and messages in events, as bytes and objects."""
    for event in events:
        if isinstance(event, TensorArrived):
            yield event.array.tobytes()
        elif isinstance(event, MessageArrived):
            yield event.message


@dataclass
class Node:
    """A side with its queue of frames to send, its frames in transit, and what it has received."""

    conversation: Conversation
    greetings: deque[bytes] = field(default_factory=deque)
    line: list[bytes] = field(default_factory=list)
    queue: deque[tuple[Header, np.ndarray]] = field(default_factory=deque)
    queued: list[bytes | dict[str, Any]] = field(default_factory=list)
    received: list[bytes | dict[str, Any]] = field(default_factory=list)

    def connect(self) -> None:
        self.greetings += map(join_packet, self.conversation.connect())

    def disconnect(self) -> None:
        self.greetings.clear()
        self.line.clear()
        self.conversation.disconnect()

    def queue_frames(self, frames: list[tuple[Header, np.ndarray]], content: bytes | dict[str, Any]) -> None:
        self.queue += frames
        self.queued.append(content)

    def send_next(self) -> bool:
        """Send the next frame if there is room; returns whether it was sent."""
        if not self.queue or not self.conversation.ready or self.conversation.room <= 0:
            return False
        self.line.append(join_packet(self.conversation.build_frame(*self.queue.popleft())))
        return True

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Answer(packets):
                    self.greetings += map(join_packet, packets)
                case Opened(resend):
                    self.line += map(join_packet, resend)
                case Acknowledged(frames, size):
                    assert frames > 0 and size > 0
        self.received += read_contents(events)
        if packet := self.conversation.take_acknowledgement():
            self.line.append(join_packet(packet))
