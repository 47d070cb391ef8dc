"""Helpers: two conversations and a line between them that can be cut, and short forms of messages."""

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
from whale_nebula.wire.frame import HEADER_BYTES, Header, Kind, checksum, chunks, pack, unpack
from whale_nebula.wire.greeting import Greeting
from whale_nebula.wire.message import encode_message
from whale_nebula.wire.tensor import array_bytes, dtype_code

NAMES = ("gpu/0", "npu/0")
STEP = {"kind": "SESSION", "about": "STEP", "program": 7, "step": 0, "rows": 1, "inputs": {}}
BYE = {"kind": "BYE"}
FAIL = {"kind": "FAIL", "reason": {"what": "it broke"}}


@dataclass
class SharedSecret:
    """A proof by a secret that both know: enough to see that everything is proven that has to be."""

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
        """Good for ever."""


def greeting(side: int, **fields: Any) -> Greeting:
    return Greeting(**{"run": "run-1", "worker": NAMES[side], "peer": NAMES[1 - side], **fields})


def conversation(side: int, *, proven: bool = False, sealed: bool = False, **options: Any) -> Conversation:
    """One side; `sealed` implies a proof."""
    prover = SharedSecret(NAMES[side]) if proven or sealed else None
    options = {"prover": prover, "sealed": sealed, **options}
    return Conversation(side, 1 - side, options.pop("greeting", greeting(side)), **options)


def pair(**options: Any) -> tuple[Conversation, Conversation]:
    return conversation(0, **options), conversation(1, **options)


def header_of(frame: bytes, sealed: bool = False) -> Header:
    return unpack(frame[:HEADER_BYTES], sealed=sealed)[0]


def changed(frame: bytes, **fields: Any) -> bytes:
    """A frame with other fields and right checksums."""
    header = header_of(frame)._replace(**fields)
    payload = np.frombuffer(frame[HEADER_BYTES:], np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale_nebula.wire.frame.find_fault", lambda header, sealed: None)
        return pack(header, checksum(payload)) + payload.tobytes()


def whole(packet: Packet) -> bytes:
    """A frame as one message."""
    return packet[0] + packet[1].tobytes()


def said(side: int, message: Mapping[str, Any]) -> list[tuple[Header, np.ndarray]]:
    payload = np.frombuffer(encode_message(message), np.uint8)
    header = Header(Kind.CONTROL, source=side, destination=1 - side, dtype=dtype_code("uint8"), dims=payload.shape)
    return list(chunks(header, payload))


def tensor(side: int, array: np.ndarray, **fields: int) -> list[tuple[Header, np.ndarray]]:
    header = Header(
        Kind.SCALAR, source=side, destination=1 - side, program=7, dtype=dtype_code(array.dtype.name), dims=array.shape
    )
    return list(chunks(header._replace(**fields), array_bytes(array)))


def sent(talk: Conversation, frames: list[tuple[Header, np.ndarray]]) -> list[bytes]:
    """The frames of a tensor or message as they go out."""
    return [whole(talk.frame(*frame)) for frame in frames]


def greet(a: Conversation, b: Conversation) -> tuple[list[Event], list[Event]]:
    """Let both greet on a new connection; gives what each learned by it."""
    hellos = whole(a.connect()[0]), whole(b.connect()[0])
    (to_b,), (to_a,) = a.receive(hellos[1]), b.receive(hellos[0])
    assert isinstance(to_b, Answer) and isinstance(to_a, Answer)
    return a.receive(whole(to_a.packets[0])), b.receive(whole(to_b.packets[0]))


def opened(*, stepping: bool = False, **options: Any) -> tuple[Conversation, Conversation]:
    """Two sides that have greeted; `stepping`: and announced step 0 of program 7."""
    a, b = pair(**options)
    greet(a, b)
    if stepping:
        for side, (here, there) in enumerate(((a, b), (b, a))):
            there.receive(sent(here, said(side, STEP))[0])
    return a, b


def cut(*sides: Conversation) -> None:
    for side in sides:
        side.disconnect()


def contents(events: list[Event]) -> Iterator[bytes | dict[str, Any]]:
    """What the other side sent, without what is about the line."""
    for event in events:
        if isinstance(event, TensorArrived):
            yield event.array.tobytes()
        elif isinstance(event, MessageArrived):
            yield event.message


@dataclass
class Node:
    """A side with what it still has to send, what it has on the line, and what came to it."""

    talk: Conversation
    greetings: deque[bytes] = field(default_factory=deque)
    line: list[bytes] = field(default_factory=list)
    queue: deque[tuple[Header, np.ndarray]] = field(default_factory=deque)
    sent: list[bytes | dict[str, Any]] = field(default_factory=list)
    got: list[bytes | dict[str, Any]] = field(default_factory=list)
    opened: list[bool] = field(default_factory=list)

    def up(self) -> None:
        self.greetings += map(whole, self.talk.connect())

    def down(self) -> None:
        self.greetings.clear()
        self.line.clear()
        self.talk.disconnect()

    def say(self, frames: list[tuple[Header, np.ndarray]], content: bytes | dict[str, Any]) -> None:
        self.queue += frames
        self.sent.append(content)

    def pump(self) -> bool:
        """Put the next frame on the line, if that may be."""
        if not self.queue or not self.talk.ready or self.talk.room() <= 0:
            return False
        self.line.append(whole(self.talk.frame(*self.queue.popleft())))
        return True

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Answer(packets):
                    self.greetings += map(whole, packets)
                case Opened(resend, resumed):
                    self.opened.append(resumed)
                    self.line += map(whole, resend)
                case Acknowledged(frames, size):
                    assert frames > 0 and size > 0
        self.got += contents(events)
        if packet := self.talk.due():
            self.line.append(whole(packet))
