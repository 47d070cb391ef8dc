"""Bytes that no correct worker sends, and a conversation that receives them."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import google_crc32c
import numpy as np

from tests.unit.wire.conversations import (
    NAMES,
    STEP,
    SharedSecretProver,
    frame_message,
    frame_tensor,
    greet,
    join_packet,
    make_conversation,
    make_greeting,
)
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.buffers import Bound
from whale_nebula.wire.conversation import Conversation, Event
from whale_nebula.wire.frame import HEADER_BYTES, Header, checksum, lay_out
from whale_nebula.wire.message import State

CAP = 1 << 16  # no tensor that a victim takes may be larger
SLOTS = 4
CODEC, EXTRA = 3, 16  # of the slot whose tensors a codec may have made

_VALUES = (0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_TOPS = dict.fromkeys(("kind", "direction", "dtype"), 255)
_TOPS |= dict.fromkeys(("flags", "phase", "shard", "codec"), 2**16 - 1)
_TOPS |= dict.fromkeys(("conversation", "source", "destination", "slot", "length", "state"), 2**32 - 1)
_TOPS |= dict.fromkeys(("sequence", "ack", "program", "step", "offset", "whole"), 2**64 - 1)
_TEXTS = (
    b"[" * 5_000,
    b'{"kind":' + b"9" * 5_000 + b"}",
    b'{"kind":"SESSION","about":"STEP","program":1e999,"step":0}',
    b'{"kind":"SESSION","about":"STEP","program":-1,"step":18446744073709551616}',
    b'{"kind":"SESSION","about":{}}',
    b'{"kind":null}',
    b'{"kind":"\\ud800"}',
    b"\xff\xfe{}",
    b"NaN",
    b"",
)


def expect(header: Header) -> Bound | None:
    """A plan with few slots: bytes in some, in one of them perhaps encoded; anything up to the limit in the last."""
    if header.slot >= SLOTS:
        raise RemoteProtocolError(f"nobody expects slot {header.slot}")
    if header.slot == SLOTS - 2:
        return Bound("uint8", (CAP,), frozenset({CODEC}), EXTRA)
    return Bound("uint8", (CAP,)) if header.slot < SLOTS - 1 else None


def victim(window: int = 0, *, sealed: bool = False) -> Conversation:
    """Who gets the bytes; always with the same nonces."""
    prover = SharedSecretProver(NAMES[0])
    talk = make_conversation(
        0,
        greeting=make_greeting(0, nonce=b"a" * 16),
        prover=prover,
        sealed=sealed,
        expect=expect,
        limit=CAP,
        window=window,
    )
    talk._introduction._draw_challenge = lambda: b"c" * 16
    return talk


def peer(*, sealed: bool = False) -> Conversation:
    """Who greets it in good order."""
    talk = make_conversation(
        1, greeting=make_greeting(1, nonce=b"b" * 16), prover=SharedSecretProver(NAMES[1]), sealed=sealed
    )
    talk._introduction._draw_challenge = lambda: b"d" * 16
    return talk


def recorded() -> tuple[bytes, bytes]:
    """HELLO and AUTH of the peer, as every (unsealed) victim takes them."""
    here, there = victim(), peer()
    said_first = join_packet(here.connect()[0])
    hello = join_packet(there.connect()[0])
    (answer,) = there.receive(said_first)
    return hello, join_packet(answer.packets[0])


def forged(header: Header, payload: bytes, *, length: bool = True) -> bytes:
    """A frame with right checksums, whatever else is wrong with it."""
    if length:
        header = header._replace(length=len(payload))
    body = lay_out(header, checksum(np.frombuffer(payload, np.uint8)))[:-4]
    return body + google_crc32c.value(body).to_bytes(4, "little") + payload


class Hostile:
    """Makes hostile frames for a victim, which it brings into some state first."""

    def __init__(self, draw: random.Random, *, window: int = 0, sealed: bool = False) -> None:
        self.draw = draw
        self.window = window
        self.sealed = sealed
        self._anew()

    def prepared(self) -> Conversation:
        """The victim, greeted or not, stepping or inside a tensor; most often on the connection that it has."""
        ended = {self.talk.states[1], self.talk._theirs.before} & {State.DRAINED, State.FAILED}
        if ended or self.talk.received > 2**60:
            self._anew()
        elif self.talk._theirs.greeted and self.draw.random() < 0.9:
            self.talk._error = None
        else:
            self._connect()
        if self.talk.ready and self.draw.random() < 0.5:
            self._step()
        return self.talk

    def _anew(self) -> None:
        """Another victim, greeted in good order."""
        self.talk, self.peer = victim(self.window, sealed=self.sealed), peer(sealed=self.sealed)
        greet(self.talk, self.peer)
        self._connect()

    def _connect(self) -> None:
        """A new connection, on which the greeting may come only in part."""
        self.talk.disconnect()
        self.peer.disconnect()
        said_first = join_packet(self.talk.connect()[0])
        hello = join_packet(self.peer.connect()[0])
        (answer,) = self.peer.receive(said_first)
        self.greeting = hello, join_packet(answer.packets[0])
        for frame in self.greeting[: self.draw.choice((0, 1, 2, 2, 2, 2))]:
            self.talk.receive(frame)

    def _step(self) -> None:
        """A step begins."""
        self.talk._assembly._tensor = None
        self.talk._arrivals.forget()
        self.talk.receive(self._numbered(*frame_message(1, STEP)[0]))

    def frames(self) -> Iterator[bytes]:
        """For ever."""
        makers: tuple[Callable[[], bytes], ...] = (
            lambda: self._numbered(*self._good()),
            self._noise,
            self._flipped,
            self._cut,
            self._lie,
            self._lie,
            self._text,
            self._greeting,
            self._number,
        )
        while True:
            yield self.draw.choice(makers)()

    def _numbered(self, header: Header, chunk: Any, number: int | None = None) -> bytes:
        sequence = self.talk.received if number is None else number
        header = header._replace(sequence=min(sequence, 2**64 - 1), conversation=self.talk.number, ack=1)
        if self.peer._sealer is not None:
            header, chunk = self.peer._sealer.seal(header, chunk)
        return forged(header, chunk.tobytes())

    def _good(self) -> tuple[Header, np.ndarray]:
        messages = ({"kind": "PING", "last": False}, STEP, {"kind": "SESSION", "about": "MEET"}, {"kind": "BYE"})
        if self.draw.random() < 0.4:
            return frame_message(1, self.draw.choice(messages))[0]
        size = self.draw.choice((0, 1, 40, 40, 1_000, 1_000, 1_000, CAP, CAP + 1))
        array, slot = np.zeros(size, np.uint8), self.draw.randrange(SLOTS)
        return self._encoded(array, slot) if self.draw.random() < 0.3 else frame_tensor(1, array, slot=slot)[0]

    def _encoded(self, array: np.ndarray, slot: int) -> tuple[Header, np.ndarray]:
        """The first frame of a tensor that a codec made: of one that this slot allows or not, smaller or larger."""
        dims = (max(0, array.size - self.draw.choice((0, EXTRA, EXTRA + 1, -500))),)
        codec, state = self.draw.choice((CODEC, CODEC, 1, 65_535)), self.draw.choice((0, 1, 2**32 - 1))
        return frame_tensor(1, array, slot=slot, codec=codec, state=state, dims=dims)[0]

    def _noise(self) -> bytes:
        return self.draw.randbytes(self.draw.randrange(400))

    def _flipped(self) -> bytes:
        data = bytearray(self._numbered(*self._good()))
        for _ in range(self.draw.randint(1, 3)):
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(data)

    def _cut(self) -> bytes:
        data = self._numbered(*self._good())
        return data[: self.draw.randrange(len(data))] + self.draw.choice((b"", data[:50]))

    def _lie(self) -> bytes:
        """One to three fields of a good frame have other values."""
        header, chunk = self._good()
        if self.peer._sealer is not None and self.draw.random() < 0.7:
            header = header._replace(sequence=self.talk.received, conversation=self.talk.number)
            header, chunk = self.peer._sealer.seal(header, chunk)
        header = header._replace(sequence=self.talk.received, conversation=self.talk.number, ack=1)
        for name in self.draw.sample((*_TOPS, "dims", "micro_batch"), self.draw.randint(1, 3)):
            header = header._replace(**{name: self._value(name)})
        return forged(header, chunk.tobytes(), length=self.draw.random() < 0.5)

    def _value(self, name: str) -> Any:
        if name == "dims":
            return tuple(min(self.draw.choice(_VALUES), 2**32 - 1) for _ in range(self.draw.randint(0, 8)))
        if name == "micro_batch":
            return self.draw.choice((-(2**31), -2, 0, 2**31 - 1))
        return min(self.draw.choice(_VALUES), _TOPS[name])

    def _text(self) -> bytes:
        header, chunk = frame_message(1, {"kind": "PING", "last": False})[0]
        text = self.draw.choice(_TEXTS) if self.draw.random() < 0.5 else self._garbled(chunk.tobytes())
        header = header._replace(length=len(text), whole=len(text), dims=(len(text),))
        return self._numbered(header, np.frombuffer(text, np.uint8))

    def _greeting(self) -> bytes:
        frame = self.draw.choice(self.greeting)
        text = self._garbled(frame[HEADER_BYTES:]) if self.draw.random() < 0.7 else frame[HEADER_BYTES:]
        header = frame_message(1, {"kind": "PING", "last": False})[0][0]
        return forged(header._replace(whole=len(text), dims=(len(text),)), text)

    def _garbled(self, text: bytes) -> bytes:
        data = bytearray(text)
        for _ in range(self.draw.randint(1, 2)):
            place = self.draw.randrange(len(data) + 1)
            data[place : place + self.draw.randrange(4)] = self.draw.randbytes(self.draw.randrange(4))
        return bytes(data)

    def _number(self) -> bytes:
        """A good frame with the number of another."""
        number = self.draw.choice((0, 1, self.talk.received + 1, self.talk.received + 5, 2**64 - 1))
        return self._numbered(*self._good(), number=number)


def fed(talk: Conversation, frames: Iterator[bytes]) -> tuple[list[Event], bool]:
    """What a victim makes of these frames, and whether it refuses them. Any other error than a refusal is raised, and
    so is an array above the cap.
    """
    events: list[Event] = []
    with watched():
        try:
            for frame in frames:
                events += talk.receive(frame)
        except RemoteProtocolError as error:
            raise_cause(error)
            return events, True
        raise_cause(talk.error)
        return events, talk.error is not None


def raise_cause(error: Exception | None) -> None:
    """Of a refusal that stands for an error of another type, raise that one: a decoder has let it out."""
    if error is not None and error.__cause__ is not None:
        raise error.__cause__


largest = [0]  # of the arrays that victims made


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Arrays that are made in here must not be above the cap."""
    plain = np.empty

    def empty(shape: Any, *rest: Any) -> np.ndarray:
        largest[0] = max(largest[0], size := int(np.prod(shape)))
        assert size <= CAP, f"an array of {size} bytes was made"
        return plain(shape, *rest)

    np.empty = empty
    try:
        yield
    finally:
        np.empty = plain
