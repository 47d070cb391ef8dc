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
from whale_nebula.wire.frame import HEADER_BYTES, Header, compute_checksum, encode_header
from whale_nebula.wire.message import State

CAP = 1 << 16  # the largest tensor that a victim accepts
SLOTS = 4
CODEC, EXTRA = 3, 16  # of the slot whose tensors may be encoded

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


def find_bound(header: Header) -> Bound | None:
    """A plan with few slots: bytes, in one slot possibly encoded, and anything up to the limit in the last one."""
    if header.slot >= SLOTS:
        raise RemoteProtocolError(f"nobody expects slot {header.slot}")
    if header.slot == SLOTS - 2:
        return Bound("uint8", (CAP,), frozenset({CODEC}), EXTRA)
    return Bound("uint8", (CAP,)) if header.slot < SLOTS - 1 else None


def make_victim(window: int = 0, *, sealed: bool = False) -> Conversation:
    """A conversation that receives the frames, with fixed nonces."""
    prover = SharedSecretProver(NAMES[0])
    conversation = make_conversation(
        0,
        greeting=make_greeting(0, nonce=b"a" * 16),
        prover=prover,
        sealed=sealed,
        expect=find_bound,
        limit=CAP,
        window=window,
    )
    conversation._handshake._draw_challenge = lambda: b"c" * 16
    return conversation


def make_peer(*, sealed: bool = False) -> Conversation:
    """The valid peer of a victim, with fixed nonces."""
    conversation = make_conversation(
        1, greeting=make_greeting(1, nonce=b"b" * 16), prover=SharedSecretProver(NAMES[1]), sealed=sealed
    )
    conversation._handshake._draw_challenge = lambda: b"d" * 16
    return conversation


def forge_frame(header: Header, payload: bytes, *, length: bool = True) -> bytes:
    """A frame with valid checksums and otherwise unchecked fields."""
    if length:
        header = header._replace(length=len(payload))
    body = encode_header(header, compute_checksum(np.frombuffer(payload, np.uint8)))[:-4]
    return body + google_crc32c.value(body).to_bytes(4, "little") + payload


class HostileFrames:
    """Generates hostile frames for a victim in a random state."""

    def __init__(self, draw: random.Random, *, window: int = 0, sealed: bool = False) -> None:
        self.draw = draw
        self.window = window
        self.sealed = sealed
        self._replace_victim()

    def prepare_victim(self) -> Conversation:
        """The victim, greeted or not, stepping or inside a tensor; mostly on its current connection."""
        ended = {self.conversation.states[1], self.conversation._peer_side.state_before} & {State.DRAINED, State.FAILED}
        if ended or self.conversation.expected_number > 2**60:
            self._replace_victim()
        elif self.conversation._peer_side.greeted and self.draw.random() < 0.9:
            self.conversation._error = None
        else:
            self._connect()
        if self.conversation.ready and self.draw.random() < 0.5:
            self._begin_step()
        return self.conversation

    def _replace_victim(self) -> None:
        """Create another victim and greet it."""
        self.conversation, self.peer = make_victim(self.window, sealed=self.sealed), make_peer(sealed=self.sealed)
        greet(self.conversation, self.peer)
        self._connect()

    def _connect(self) -> None:
        """Open a new connection, on which the greeting may remain incomplete."""
        self.conversation.disconnect()
        self.peer.disconnect()
        own_hello = join_packet(self.conversation.connect()[0])
        hello = join_packet(self.peer.connect()[0])
        (answer,) = self.peer.receive(own_hello)
        self.greeting = hello, join_packet(answer.packets[0])
        for frame in self.greeting[: self.draw.choice((0, 1, 2, 2, 2, 2))]:
            self.conversation.receive(frame)

    def _begin_step(self) -> None:
        """Begin a step."""
        self.conversation._assembly._tensor = None
        self.conversation._arrivals.drop_held()
        self.conversation.receive(self._number_frame(*frame_message(1, STEP)[0]))

    def generate_frames(self) -> Iterator[bytes]:
        """Generate frames without end."""
        makers: tuple[Callable[[], bytes], ...] = (
            lambda: self._number_frame(*self._make_frame()),
            self._make_noise,
            self._flip_bits,
            self._truncate,
            self._change_fields,
            self._change_fields,
            self._change_text,
            self._change_greeting,
            self._change_number,
        )
        while True:
            yield self.draw.choice(makers)()

    def _number_frame(self, header: Header, chunk: Any, number: int | None = None) -> bytes:
        sequence = self.conversation.expected_number if number is None else number
        header = header._replace(sequence=min(sequence, 2**64 - 1), conversation=self.conversation.number, ack=1)
        if self.peer._sealer is not None:
            header, chunk = self.peer._sealer.seal(header, chunk)
        return forge_frame(header, chunk.tobytes())

    def _make_frame(self) -> tuple[Header, np.ndarray]:
        messages = ({"kind": "PING", "last": False}, STEP, {"kind": "SESSION", "about": "MEET"}, {"kind": "BYE"})
        if self.draw.random() < 0.4:
            return frame_message(1, self.draw.choice(messages))[0]
        size = self.draw.choice((0, 1, 40, 40, 1_000, 1_000, 1_000, CAP, CAP + 1))
        array, slot = np.zeros(size, np.uint8), self.draw.randrange(SLOTS)
        return self._make_encoded(array, slot) if self.draw.random() < 0.3 else frame_tensor(1, array, slot=slot)[0]

    def _make_encoded(self, array: np.ndarray, slot: int) -> tuple[Header, np.ndarray]:
        """The first frame of an encoded tensor: with an allowed codec or not, of an allowed size or not."""
        dims = (max(0, array.size - self.draw.choice((0, EXTRA, EXTRA + 1, -500))),)
        codec, state = self.draw.choice((CODEC, CODEC, 1, 65_535)), self.draw.choice((0, 1, 2**32 - 1))
        return frame_tensor(1, array, slot=slot, codec=codec, state=state, dims=dims)[0]

    def _make_noise(self) -> bytes:
        return self.draw.randbytes(self.draw.randrange(400))

    def _flip_bits(self) -> bytes:
        data = bytearray(self._number_frame(*self._make_frame()))
        for _ in range(self.draw.randint(1, 3)):
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(data)

    def _truncate(self) -> bytes:
        data = self._number_frame(*self._make_frame())
        return data[: self.draw.randrange(len(data))] + self.draw.choice((b"", data[:50]))

    def _change_fields(self) -> bytes:
        """A valid frame in which one to three fields have other values."""
        header, chunk = self._make_frame()
        if self.peer._sealer is not None and self.draw.random() < 0.7:
            header = header._replace(sequence=self.conversation.expected_number, conversation=self.conversation.number)
            header, chunk = self.peer._sealer.seal(header, chunk)
        header = header._replace(
            sequence=self.conversation.expected_number, conversation=self.conversation.number, ack=1
        )
        for name in self.draw.sample((*_TOPS, "dims", "micro_batch"), self.draw.randint(1, 3)):
            header = header._replace(**{name: self._draw_value(name)})
        return forge_frame(header, chunk.tobytes(), length=self.draw.random() < 0.5)

    def _draw_value(self, name: str) -> Any:
        if name == "dims":
            return tuple(min(self.draw.choice(_VALUES), 2**32 - 1) for _ in range(self.draw.randint(0, 8)))
        if name == "micro_batch":
            return self.draw.choice((-(2**31), -2, 0, 2**31 - 1))
        return min(self.draw.choice(_VALUES), _TOPS[name])

    def _change_text(self) -> bytes:
        header, chunk = frame_message(1, {"kind": "PING", "last": False})[0]
        text = self.draw.choice(_TEXTS) if self.draw.random() < 0.5 else self._garble(chunk.tobytes())
        header = header._replace(length=len(text), whole=len(text), dims=(len(text),))
        return self._number_frame(header, np.frombuffer(text, np.uint8))

    def _change_greeting(self) -> bytes:
        frame = self.draw.choice(self.greeting)
        text = self._garble(frame[HEADER_BYTES:]) if self.draw.random() < 0.7 else frame[HEADER_BYTES:]
        header = frame_message(1, {"kind": "PING", "last": False})[0][0]
        return forge_frame(header._replace(whole=len(text), dims=(len(text),)), text)

    def _garble(self, text: bytes) -> bytes:
        data = bytearray(text)
        for _ in range(self.draw.randint(1, 2)):
            place = self.draw.randrange(len(data) + 1)
            data[place : place + self.draw.randrange(4)] = self.draw.randbytes(self.draw.randrange(4))
        return bytes(data)

    def _change_number(self) -> bytes:
        """A valid frame with the number of another one."""
        number = self.draw.choice(
            (0, 1, self.conversation.expected_number + 1, self.conversation.expected_number + 5, 2**64 - 1)
        )
        return self._number_frame(*self._make_frame(), number=number)


def feed_frames(conversation: Conversation, frames: Iterator[bytes]) -> tuple[list[Event], bool]:
    """Deliver frames; returns the events, and whether one was refused. Any other error is raised, as for an array
    above the cap.
    """
    events: list[Event] = []
    with limit_arrays():
        try:
            for frame in frames:
                events += conversation.receive(frame)
        except RemoteProtocolError as error:
            raise_cause(error)
            return events, True
        raise_cause(conversation.error)
        return events, conversation.error is not None


def raise_cause(error: Exception | None) -> None:
    """Raise the error that a refusal wraps, as a decoder should have handled it."""
    if error is not None and error.__cause__ is not None:
        raise error.__cause__


largest_array = [0]  # of the arrays that victims allocated


@contextlib.contextmanager
def limit_arrays() -> Iterator[None]:
    """Context in which an array above the cap is an AssertionError."""
    plain = np.empty

    def empty(shape: Any, *rest: Any) -> np.ndarray:
        largest_array[0] = max(largest_array[0], size := int(np.prod(shape)))
        assert size <= CAP, f"an array of {size} bytes was made"
        return plain(shape, *rest)

    np.empty = empty
    try:
        yield
    finally:
        np.empty = plain
