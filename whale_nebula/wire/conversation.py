"""The session state machine of two workers, sans-I/O: frames in, events and frames out.

It outlives its connections. On each connection both sides greet and authenticate; then they send numbered frames, which
also acknowledge the other side's frames. After a broken connection the next one resumes: frames that were not
acknowledged are retransmitted byte for byte, and duplicates are dropped. It uses no clock and no lock: its owner calls
it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from whale_nebula.errors import DamagedFrameError, LocalProtocolError, NebulaError, RemoteProtocolError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.wire.buffers import (
    FIRST,
    MAX_TENSOR_BYTES,
    Acknowledged,
    Arrivals,
    Assembly,
    Expect,
    MessageArrived,
    Packet,
    TensorArrived,
    UnacknowledgedFrames,
    count_held_bytes,
)
from whale_nebula.wire.frame import (
    BARE,
    CHUNK_BYTES,
    FRAME_CAP,
    HEADER_BYTES,
    Flag,
    Header,
    Kind,
    compute_checksum,
    pack_header,
    split_payload,
    unpack_header,
    unseal_header,
)
from whale_nebula.wire.greeting import (
    Exchange,
    Greeting,
    Handshake,
    Prover,
    Sealer,
    build_salt,
    derive_conversation_number,
)
from whale_nebula.wire.message import (
    Side,
    State,
    Trigger,
    apply_frame,
    build_message_header,
    decode_message,
    encode_message,
    has_program_lines,
)
from whale_nebula.wire.tensor import Bytes

BUDGET_BYTES = 40 << 20
"""Send budget. With the receiver's buffer before back-pressure, and one message, a link uses at most 64 MiB of memory.
"""
ACK_BYTES = BUDGET_BYTES // 4
GREETING_BYTES = 64 << 10
_OVERRUN_BYTES = FRAME_CAP + 4 * CHUNK_BYTES  # the last frame of a tensor and messages may exceed the budget
_ENDED = (State.DRAINED, State.FAILED)


class Answer(NamedTuple):
    """Event: the other side has sent its HELLO. These frames must be sent now."""

    packets: list[Packet]


class Opened(NamedTuple):
    """Event: both sides are authenticated. These frames, which the other side lacks, must be sent first.

    `resumed`: this is not the first connection.
    """

    resend: list[Packet]
    resumed: bool


Event: TypeAlias = TensorArrived | MessageArrived | Answer | Opened | Acknowledged
_Frame: TypeAlias = tuple[Header, Bytes]


class Conversation:
    """The protocol state machine between worker `here` and worker `there` (their numbers on the wire), without I/O.

    `expect` and `limit` bound what may arrive, as for `Assembly`; `budget` is how many bytes are kept until they are
    acknowledged; `window` how many may arrive early (more than 0 if several connections carry the frames, none of which
    overtakes the greeting). While `accepts_data` is false nothing more is acknowledged, so the other side stalls once
    its budget is used up, and more than that is refused. With a `prover` both sides authenticate, and with `sealed`
    frames are encrypted end to end.

    A violation by the other side raises `RemoteProtocolError`, now and until `disconnect`; complete frames before it
    are kept, so a new connection resumes after the last valid frame.
    """

    def __init__(
        self,
        here: int,
        there: int,
        greeting: Greeting,
        *,
        expect: Expect | None = None,
        limit: int = MAX_TENSOR_BYTES,
        budget: int = BUDGET_BYTES,
        window: int = 0,
        accepts_data: Callable[[], bool] = lambda: True,
        prover: Prover | None = None,
        sealed: bool = False,
    ) -> None:
        self.number = 0  # until the first greeting is complete
        self._own_number, self._peer_number = here, there
        self._exchange = Exchange() if sealed else None
        self._sealer: Sealer | None = None
        self._handshake = Handshake(greeting, budget, prover, self._exchange.public if self._exchange else None)
        self._own_side, self._peer_side = Side(), Side()
        self._sent = UnacknowledgedFrames(budget)
        self._arrivals = Arrivals[_Frame](window)
        self._assembly = Assembly(expect, limit=limit)
        self._connected = False
        self._error: NebulaError | None = None
        self._accepts_data = accepts_data
        self._acknowledged_number = FIRST  # all frames before this one are acknowledged
        # Bytes taken since the last acknowledgement. An early frame counts when it is taken: repeating an
        # acknowledgement does not help a sender that waits for room.
        self._unanswered_bytes = 0
        self._ack_bytes = ACK_BYTES

    # Queries by its owner.

    @property
    def ready(self) -> bool:
        """Whether numbered frames may be sent on the current connection."""
        return self._connected and self._own_side.greeted and self._peer_side.greeted and self._error is None

    @property
    def unacknowledged_bytes(self) -> int:
        """The number of bytes that were sent and are not acknowledged."""
        return self._sent.bytes

    @property
    def expected_number(self) -> int:
        """The number of the next frame that is expected: it increases with every frame that is taken."""
        return self._arrivals.expected_number

    @property
    def states(self) -> tuple[State, State]:
        """The states of this side and of the other one."""
        return self._own_side.state, self._peer_side.state

    @property
    def peer_certificate(self) -> str | None:
        """The certificate with which the other side has authenticated, on the current connection or the previous one;
        None before that, and without a prover.
        """
        return self._handshake.peer_certificate

    @property
    def error(self) -> NebulaError | None:
        """The protocol error of the other side on the current connection, which the next call of `receive` raises."""
        return self._error

    @property
    def room(self) -> int:
        """The number of bytes that may be sent before an acknowledgement is needed; none at 0 or below."""
        return self._sent.room

    def begin_session(self, epoch: int) -> None:
        """Begin the session: all workers have agreed on the run's epoch, and processes of other epochs are refused from
        now on.
        """
        self._handshake.begin_session(epoch)

    # Connections.

    def connect(self) -> list[Packet]:
        """A connection is up: returns the frames to send on it first."""
        if self._connected:
            raise LocalProtocolError("there is already a connection", mend="call disconnect() first")
        self._connected = True
        expected = self._arrivals.expected_number
        packet = self._build_greeting(self._handshake.build_hello(expected, self._update_acknowledgement()))
        self._own_side = _require_side(self._own_side.advance(Trigger.HELLO))
        return [packet]

    def disconnect(self) -> None:
        """The connection is lost. Complete frames are kept, and a partial one is discarded."""
        self._connected = False
        self._error = None
        self._own_side, self._peer_side = self._own_side.disconnect(), self._peer_side.disconnect()
        self._arrivals.drop_held()

    # Outgoing frames.

    def build_frame(self, header: Header, chunk: Bytes) -> Packet:
        """A frame to be sent: numbered, sealed if required, and kept until it is acknowledged.

        `header` and `chunk` are an item of `split_payload`. Messages may exceed the budget; tensors wait for `room`.
        """
        if not self.ready:
            raise LocalProtocolError("cannot send a frame before the greeting is complete", mend="wait for Opened")
        message, fault = None, None
        if header.kind in BARE or (header.source, header.destination) != (self._own_number, self._peer_number):
            fault = f"kind {header.kind} from worker {header.source} to worker {header.destination}"
        elif header.length != chunk.size:
            fault = f"a chunk of {chunk.size} bytes under a header for {header.length}"
        elif header.flags & Flag.SEALED:
            fault = "a sealed header"
        elif header.kind != Kind.CONTROL and self.room <= 0:
            fault = f"the budget is used up: {self.unacknowledged_bytes} bytes are not acknowledged"
        elif header.kind == Kind.CONTROL:
            try:
                message = decode_message(chunk.tobytes())
            except RemoteProtocolError as error:
                raise LocalProtocolError(error.what) from None
        side = fault or apply_frame(self._own_side, header, message)
        if isinstance(side, str):
            raise LocalProtocolError(f"invalid outgoing frame: {side}")
        numbered = header._replace(
            conversation=self.number, sequence=self._sent.next_number, ack=self._update_acknowledgement()
        )
        if self._sealer is not None:
            numbered, chunk = self._sealer.seal(numbered, chunk)
        packet = pack_header(numbered, compute_checksum(chunk), sealed=self._sealer is not None), chunk
        self._sent.keep(packet)
        self._own_side = side
        return packet

    def take_acknowledgement(self) -> Packet | None:
        """A bare acknowledgement, if one is due."""
        return self._build_bare(Kind.ACK) if self.has_due_acknowledgement else None

    @property
    def has_due_acknowledgement(self) -> bool:
        """Whether an acknowledgement is due."""
        ended = self._peer_side.state in _ENDED
        return (
            self.ready
            and self._unanswered_bytes > (0 if ended else self._ack_bytes)
            and (ended or self._accepts_data())
        )

    def build_heartbeat(self) -> Packet:
        """A heartbeat frame, which also acknowledges."""
        if not self.ready:
            raise LocalProtocolError("cannot send a heartbeat before the greeting is complete")
        return self._build_bare(Kind.BEAT)

    def _update_acknowledgement(self) -> int:
        """Acknowledge all frames that have arrived, unless data is held back; returns the number for a header."""
        if self._peer_side.state in _ENDED or self._accepts_data():
            self._acknowledged_number, self._unanswered_bytes = self._arrivals.expected_number, 0
        return self._acknowledged_number

    def _build_bare(self, kind: Kind) -> Packet:
        header = Header(
            kind, Flag.LAST, self.number, 0, self._update_acknowledgement(), 0, 0, self._own_number, self._peer_number
        )
        return pack_header(header, 0), np.empty(0, np.uint8)

    def _build_greeting(self, message: Mapping[str, Any]) -> Packet:
        payload = np.frombuffer(encode_message(message), np.uint8)
        [(header, chunk)] = split_payload(
            build_message_header(payload.size, self._own_number, self._peer_number), payload
        )
        return pack_header(header, compute_checksum(chunk)), chunk

    # Incoming frames.

    def receive(self, message: bytes | bytearray | memoryview) -> list[Event]:
        """Process one complete frame; returns the events that it completes, in order. Errors are raised now and at
        every later call; if valid frames waited for this one, their events are returned now, and the error is raised
        at later calls.
        """
        if self._error is not None:
            raise self._error
        if not self._connected:
            raise LocalProtocolError("received bytes without a connection", mend="call connect() first")
        events: list[Event] = []
        try:
            self._process_frame(message, events)
        except Exception as error:  # any error in decoding is a fault of the received frame
            if not isinstance(error, NebulaError):
                why = f"{type(error).__name__}: {escape_foreign_text(error, 200)}"
                unreadable = RemoteProtocolError("cannot decode a received frame", why=why)
                unreadable.__cause__ = error
                error = unreadable
            self._error = error
            if not events:
                raise error from error.__cause__
        return events

    def _process_frame(self, message: bytes | bytearray | memoryview, events: list[Event]) -> None:
        """Check a frame, and process it if it belongs to the greeting, has no number, or is the next in order."""
        if len(message) < HEADER_BYTES:
            raise DamagedFrameError(f"received {len(message)} bytes, which is less than a frame's header")
        data = np.frombuffer(message, np.uint8)
        header, crc = unpack_header(data[:HEADER_BYTES].tobytes(), sealed=self._exchange is not None)
        payload = data[HEADER_BYTES:]
        if payload.size != header.length:
            raise DamagedFrameError(f"received {payload.size} bytes in a frame of {header.length}")
        if (header.source, header.destination) != (self._peer_number, self._own_number):
            raise RemoteProtocolError(
                f"received a frame from worker {header.source} to worker {header.destination} on the link from worker "
                f"{self._peer_number} to worker {self._own_number}"
            )
        if compute_checksum(payload) != crc:
            raise DamagedFrameError("the checksum of a frame's payload is wrong")
        if header.conversation == 0:
            self._process_greeting(header, payload, events)
        elif not self.ready:
            raise RemoteProtocolError("received a frame before the greeting was complete")
        elif header.conversation != self.number:
            raise RemoteProtocolError(
                f"received a frame of conversation {header.conversation} in conversation {self.number}",
                why="it was sent by a process that no longer exists",
            )
        elif header.kind in BARE:
            events += self._sent.acknowledge(header.ack)
        else:
            self._arrivals.add(header.sequence, (header, payload), HEADER_BYTES + payload.size)
            unanswered = self._unanswered_bytes + self._arrivals.bytes
            if unanswered > self._sent.budget + _OVERRUN_BYTES:
                raise RemoteProtocolError(
                    f"received frame {header.sequence} while {unanswered} bytes are not acknowledged",
                    why=f"the budget of both sides is {self._sent.budget} bytes",
                )
            while (due := self._arrivals.due_frame) is not None:
                events += self._process_numbered(*due)
                self._unanswered_bytes += count_held_bytes(HEADER_BYTES + due[1].size)
                self._arrivals.advance()

    def _process_numbered(self, header: Header, payload: Bytes) -> list[Event]:
        """Process the frame that is due; returns its events. A refused frame changes nothing."""
        self._sent.check_acknowledgement(header.ack)
        if bool(header.flags & Flag.SEALED) != (self._sealer is not None):
            raise RemoteProtocolError("received an unsealed frame on a sealed link")
        plain, message = unseal_header(header), None
        if plain.kind == Kind.CONTROL:
            data = self._open_payload(np.empty(plain.length, np.uint8), header, payload).tobytes()
            # Not parsed, as it may be large.
            if has_program_lines(data) and self._peer_side.advance(Trigger.LINES) is None:
                raise RemoteProtocolError(
                    f"unexpected message from the other side: {Trigger.LINES} in state {self._peer_side.state}"
                )
            message = decode_message(data)
        side = apply_frame(self._peer_side, plain, message)
        if isinstance(side, str):
            raise RemoteProtocolError(f"unexpected message from the other side: {side}")
        events: list[Event]
        if message is not None:
            events = [MessageArrived(plain, message)]
        else:
            if self._sealer is not None or not self._assembly.keep(plain, payload):
                self._open_payload(self._assembly.place(plain), header, payload)
            events = [*self._assembly.finish_chunk(plain)]
        self._peer_side = side
        return [*self._sent.acknowledge(header.ack), *events]

    def _open_payload(self, place: Bytes, header: Header, payload: Bytes) -> Bytes:
        if self._sealer is None:
            place[:] = payload
        else:
            self._sealer.open(header, payload, place)
        return place

    # Greetings.

    def _process_greeting(self, header: Header, payload: Bytes, events: list[Event]) -> None:
        greeting_header = build_message_header(payload.size, self._peer_number, self._own_number)
        [(expected, _)] = split_payload(greeting_header, payload)
        if header != expected or payload.size > GREETING_BYTES:
            raise RemoteProtocolError("a frame without a conversation is not a greeting")
        message = decode_message(payload.tobytes())
        trigger = Trigger(message["kind"]) if message["kind"] in (Trigger.HELLO, Trigger.AUTH) else None
        side = self._peer_side.advance(trigger) if trigger else None
        if side is None:
            raise RemoteProtocolError(
                f"unexpected greeting: {escape_foreign_text(message['kind'])} in state {self._peer_side.state}"
            )
        if trigger is Trigger.HELLO:
            events.append(Answer([self._build_greeting(self._handshake.answer_hello(message))]))
            self._own_side = _require_side(self._own_side.advance(Trigger.AUTH))
        else:
            events += self._resume(message)
        self._peer_side = side

    def _resume(self, message: Mapping[str, Any]) -> list[Event]:
        """Process the AUTH of the other side, and resume at the frame that it expects."""
        resumed = self._handshake.proven_hello is not None
        hellos = self._handshake.process_auth(message)
        peer_hello = hellos[1]
        if not max(self._sent.oldest_number, peer_hello.acknowledged) <= peer_hello.received <= self._sent.next_number:
            raise RemoteProtocolError(
                f"worker '{peer_hello.worker}' expects frame {peer_hello.received}, but frames "
                f"{self._sent.oldest_number} to {self._sent.next_number - 1} are stored",
                why="it has communicated with another process of this worker, or has lost its state",
                mend="restart all workers",
            )
        self.number = derive_conversation_number(hellos)
        if self._exchange is not None and self._sealer is None:
            material = self._exchange.agree(bytes.fromhex(peer_hello.exchange or ""), build_salt(hellos))
            self._sealer = Sealer(material, self._own_number, self._peer_number)
        self._sent.budget = min(self._sent.budget, peer_hello.budget)
        self._ack_bytes = min(ACK_BYTES, self._sent.budget // 4)
        return [
            *self._sent.acknowledge(peer_hello.acknowledged),
            Opened(self._sent.list_since(peer_hello.received), resumed),
        ]


def _require_side(side: Side | None) -> Side:
    if side is None:
        raise LocalProtocolError("the greeting was sent twice on one connection")
    return side
