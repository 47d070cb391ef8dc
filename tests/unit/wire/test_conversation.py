"""The conversation: greetings, numbers, acknowledgements, cuts, and forbidden actions of each side."""

from typing import Any

import numpy as np
import pytest

from tests.unit.wire.conversations import (
    BYE,
    FAIL,
    NAMES,
    STEP,
    SharedSecretProver,
    disconnect_all,
    frame_message,
    frame_tensor,
    greet,
    join_packet,
    make_conversation,
    make_greeting,
    make_pair,
    open_pair,
    read_contents,
    read_header,
    replace_fields,
    send_frames,
)
from whale_nebula.errors import DamagedFrameError, LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.buffers import Acknowledged, Bound
from whale_nebula.wire.conversation import ACK_BYTES, Opened
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Flag, Header, Kind, compute_checksum, pack_header
from whale_nebula.wire.message import State, build_message
from whale_nebula.wire.tensor import find_dtype_code

SMALL = np.arange(5, dtype=np.float32)
LARGE = np.arange(3 * CHUNK_BYTES // 8 + 11, dtype=np.int64)  # four frames
SEALED = pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])


ILLEGAL_FRAMES = {
    "a tensor before a step": (False, frame_tensor(0, SMALL), "TENSOR in state OPEN"),
    "a tensor of another step": (True, frame_tensor(0, SMALL, step=1), "a tensor of step 1 of program 7, but step 0"),
    "a tensor of another program": (True, frame_tensor(0, SMALL, program=8), "of program 8"),
    "a shard": (True, frame_tensor(0, SMALL, shard=1), "shard 1, but no tensor has one"),
    "a value in a step": (True, frame_tensor(0, SMALL, kind=Kind.VALUE), "VALUE in state STEPPING"),
    "a second init": (True, frame_message(0, {"kind": "SESSION", "about": "HELLO"}), "INIT in state STEPPING"),
    "lines without an agreement": (
        True,
        frame_message(0, {"kind": "SESSION", "about": "LINES", "lines": []}),
        "LINES in state",
    ),
    "an unknown session message": (True, frame_message(0, {"kind": "SESSION", "about": "X"}), "SESSION in state"),
    "a greeting of the wire": (True, frame_message(0, {"kind": "HELLO"}), "HELLO in state STEPPING"),
    "a step without numbers": (True, frame_message(0, {"kind": "SESSION", "about": "STEP"}), "without valid numbers"),
}


class TestGreeting:
    @SEALED
    def test_both_sides_are_ready_after_both_are_authenticated(self, sealed: bool) -> None:
        a, b = make_pair(sealed=sealed)
        assert not a.ready and a.number == 0
        assert greet(a, b) == ([Opened([], resumed=False)], [Opened([], resumed=False)])
        assert a.ready and b.ready and a.number == b.number != 0
        assert a.states == b.states == (State.OPEN, State.OPEN)

    def test_certificates_are_verified_on_both_sides(self) -> None:
        provers = [SharedSecretProver(name, certificate=f"certificate of {name}") for name in NAMES]
        a, b = (make_conversation(side, prover=prover) for side, prover in enumerate(provers))
        greet(a, b)
        assert [prover.verified for prover in provers] == [
            [("certificate of npu/0", "npu/0")],
            [("certificate of gpu/0", "gpu/0")],
        ]

    @pytest.mark.parametrize("error", [ValueError("\ud800\n"), TypeError("no text"), KeyError("x")], ids=repr)
    def test_exception_in_verification_becomes_remote_protocol_error(self, error: Exception) -> None:
        class Unreadable(SharedSecretProver):
            def verify(self, *given: object) -> None:
                raise error

        a, b = make_conversation(0, prover=Unreadable(NAMES[0])), make_conversation(1, proven=True)
        with pytest.raises(RemoteProtocolError, match="cannot decode a received frame") as caught:
            greet(a, b)
        assert type(error).__name__ in caught.value.why
        assert caught.value.why.isprintable()
        assert not a.ready and a.error is caught.value

    def test_frames_cannot_be_sent_before_greeting_is_complete(self) -> None:
        a, _ = make_pair()
        for _ in range(2):
            with pytest.raises(LocalProtocolError, match="before the greeting is complete"):
                a.build_frame(*frame_message(0, STEP)[0])
            with pytest.raises(LocalProtocolError, match="before the greeting is complete"):
                a.build_heartbeat()
            assert a.take_acknowledgement() is None
            if not a._connected:
                a.connect()

    def test_frames_are_refused_before_greeting_is_complete(self) -> None:
        a, b = open_pair()
        frame = send_frames(a, frame_message(0, STEP))[0]
        disconnect_all(b)
        b.connect()
        with pytest.raises(RemoteProtocolError, match="before the greeting was complete"):
            b.receive(frame)

    def test_receive_without_connection_and_second_connect_are_refused(self) -> None:
        a, b = make_pair()
        hello = join_packet(b.connect()[0])
        with pytest.raises(LocalProtocolError, match="without a connection"):
            a.receive(hello)
        a.connect()
        with pytest.raises(LocalProtocolError, match="already"):
            a.connect()

    def test_second_hello_is_refused(self) -> None:
        a, b = make_pair()
        a.connect()
        hello = join_packet(b.connect()[0])
        a.receive(hello)
        with pytest.raises(RemoteProtocolError, match="HELLO in state GREETED"):
            a.receive(hello)

    @pytest.mark.parametrize(
        "fields",
        [{"sequence": 1}, {"ack": 1}, {"step": 1}, {"kind": Kind.SCALAR}, {"dtype": find_dtype_code("bool")}],
        ids=str,
    )
    def test_hello_with_a_number_or_other_fields_is_refused(self, fields: dict[str, int]) -> None:
        a, b = make_pair()
        a.connect()
        with pytest.raises(RemoteProtocolError):
            a.receive(replace_fields(join_packet(b.connect()[0]), **fields))

    def test_oversized_hello_is_refused(self) -> None:
        a = make_conversation(0)
        a.connect()
        b = make_conversation(1, greeting=make_greeting(1, versions={str(n): "x" * 40_000 for n in range(2)}))
        with pytest.raises(RemoteProtocolError, match="is not a greeting"):
            a.receive(join_packet(b.connect()[0]))

    def test_message_other_than_hello_is_refused(self) -> None:
        a, _ = make_pair()
        a.connect()
        header, chunk = frame_message(1, BYE)[0]
        with pytest.raises(RemoteProtocolError, match="BYE in state START"):
            a.receive(pack_header(header, compute_checksum(chunk)) + chunk.tobytes())

    @pytest.mark.parametrize(("here", "there"), [(1, 0), (0, 2)], ids=["back", "to another"])
    def test_frame_of_another_worker_is_refused(self, here: int, there: int) -> None:
        a, b = make_pair()
        a.connect()
        with pytest.raises(RemoteProtocolError, match="on the link from worker 1 to worker 0"):
            a.receive(replace_fields(join_packet(b.connect()[0]), source=there, destination=here))


class TestFrames:
    @SEALED
    def test_tensors_and_messages_arrive(self, sealed: bool) -> None:
        a, b = open_pair(sealed=sealed)
        frames = [
            *frame_message(0, STEP),
            *frame_tensor(0, LARGE),
            *frame_tensor(0, np.zeros(0)),
            *frame_tensor(0, np.array(True)),
        ]
        events = [event for frame in send_frames(a, frames) for event in b.receive(frame)]
        assert list(read_contents(events)) == [STEP, LARGE.tobytes(), b"", b"\x01"]
        assert (events[1].array.dtype, events[1].array.shape) == (LARGE.dtype, LARGE.shape)
        assert not any(event.header.flags & Flag.SEALED for event in events)

    def test_unsealed_frame_is_refused_on_a_sealed_link(self) -> None:
        a, b = open_pair(sealed=True)
        header, chunk = frame_message(0, STEP)[0]
        forged = (
            pack_header(header._replace(sequence=1, conversation=a.number, ack=1), compute_checksum(chunk))
            + chunk.tobytes()
        )
        with pytest.raises(RemoteProtocolError, match="unsealed frame on a sealed link"):
            b.receive(forged)

    def test_large_tensor_is_copied_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = open_pair(stepping=True)
        allocated_bytes: list[int] = []
        plain = np.empty
        monkeypatch.setattr(
            np, "empty", lambda shape, *rest: allocated_bytes.append(int(np.prod(shape))) or plain(shape, *rest)
        )
        for frame in send_frames(a, frame_tensor(0, LARGE)):
            events = b.receive(frame)
        assert allocated_bytes == [LARGE.nbytes]
        assert np.shares_memory(events[0].array, events[0].array.base)

    def test_tensor_of_one_frame_is_copied_only_from_a_mutable_buffer(self) -> None:
        a, b = open_pair(stepping=True)
        immutable, mutable = send_frames(a, frame_tensor(0, SMALL) + frame_tensor(0, SMALL, slot=1))
        *_, event = b.receive(immutable)
        assert np.shares_memory(event.array, np.frombuffer(immutable, np.uint8)) and not event.array.flags.writeable
        buffer = bytearray(mutable)
        *_, event = b.receive(buffer)
        buffer[:] = bytes(len(buffer))
        np.testing.assert_array_equal(event.array, SMALL)

    def test_plan_is_checked_before_allocation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checked_headers: list[Header] = []

        def expect(header: Header) -> Bound:
            checked_headers.append(header)
            return Bound("float32", (3,))

        a, b = open_pair(stepping=True, expect=expect)
        monkeypatch.setattr(np, "empty", lambda *size: pytest.fail("allocated"))
        with pytest.raises(RemoteProtocolError, match="plan expects float32"):
            b.receive(send_frames(a, frame_tensor(0, SMALL, slot=4))[0])
        assert [header.slot for header in checked_headers] == [4]

    def test_tensor_above_the_limit_is_refused(self) -> None:
        a, b = open_pair(stepping=True, limit=100)
        with pytest.raises(RemoteProtocolError, match="limit of 100"):
            b.receive(send_frames(a, frame_tensor(0, np.zeros(101, np.uint8)))[0])

    def test_message_is_delivered_between_chunks_of_a_tensor(self) -> None:
        a, b = open_pair(stepping=True)
        chunk = frame_tensor(0, LARGE)
        frames = send_frames(a, [chunk[0], *frame_message(0, FAIL), *chunk[1:]])
        events = [event for frame in frames for event in b.receive(frame)]
        assert list(read_contents(events)) == [FAIL, LARGE.tobytes()]


class TestStateTable:
    """Both sides apply the table: an illegal frame is a local error of its sender, a remote one of its receiver."""

    @pytest.mark.parametrize(("stepping", "frames", "words"), ILLEGAL_FRAMES.values(), ids=ILLEGAL_FRAMES.keys())
    def test_illegal_frame_is_refused_by_sender_and_receiver(
        self, stepping: bool, frames: list[Any], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = open_pair(stepping=stepping)
        with pytest.raises(LocalProtocolError, match=words):
            a.build_frame(*frames[0])
        with monkeypatch.context() as patch:
            patch.setattr("whale_nebula.wire.conversation.apply_frame", lambda side, *rest: side)
            (frame,) = send_frames(a, frames)
        with pytest.raises(RemoteProtocolError, match=words):
            b.receive(frame)

    def test_lines_message_is_refused_unparsed_outside_agreement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = open_pair(stepping=True)
        with monkeypatch.context() as patch:
            patch.setattr("whale_nebula.wire.conversation.apply_frame", lambda side, *rest: side)
            lines = build_message("SESSION", "LINES", program="p", lines=["x"] * 9)
            (frame,) = send_frames(a, frame_message(0, lines))
        monkeypatch.setattr("whale_nebula.wire.conversation.decode_message", lambda _: pytest.fail("parsed"))
        with pytest.raises(RemoteProtocolError, match="LINES in state STEPPING"):
            b.receive(frame)

    def test_refused_outgoing_frame_does_not_change_state(self) -> None:
        a, b = open_pair(stepping=True)
        before = a.unacknowledged_bytes, a.states
        for frames in (frame_tensor(0, SMALL, step=3), frame_tensor(1, SMALL), frame_message(0, {"kind": "HELLO"})):
            with pytest.raises(LocalProtocolError):
                a.build_frame(*frames[0])
        assert (a.unacknowledged_bytes, a.states) == before
        assert list(read_contents(b.receive(send_frames(a, frame_tensor(0, SMALL))[0]))) == [SMALL.tobytes()]

    def test_outgoing_frame_with_mismatched_header_or_chunk_is_refused(self) -> None:
        a, _ = open_pair(stepping=True)
        header, chunk = frame_tensor(0, SMALL)[0]
        for wrong in (
            (header, chunk[:-1]),
            (header._replace(whole=21), chunk),
            (Header(Kind.BEAT, destination=1, flags=Flag.LAST), chunk[:0]),
            (header._replace(destination=2), chunk),
            (header._replace(flags=Flag.LAST | Flag.SEALED), chunk),
        ):
            with pytest.raises(LocalProtocolError, match="invalid outgoing frame"):
                a.build_frame(*wrong)
        junk = np.frombuffer(b"no json", np.uint8)
        with pytest.raises(LocalProtocolError, match="not JSON"):
            a.build_frame(
                frame_message(0, {"kind": "PING", "last": True})[0][0]._replace(length=7, whole=7, dims=(7,)), junk
            )

    def test_only_a_failure_may_be_sent_after_bye(self) -> None:
        a, b = open_pair(stepping=True)
        b.receive(send_frames(a, frame_message(0, BYE))[0])
        assert b.states == (State.STEPPING, State.DRAINED)
        with pytest.raises(LocalProtocolError, match="in state DRAINED"):
            a.build_frame(*frame_tensor(0, SMALL)[0])
        assert list(read_contents(b.receive(send_frames(a, frame_message(0, FAIL))[0]))) == [FAIL]


class TestAcknowledgements:
    @SEALED
    def test_acknowledged_frames_are_released(self, sealed: bool) -> None:
        a, b = open_pair(stepping=True, sealed=sealed)
        a.receive(send_frames(b, frame_message(1, {"kind": "PING", "last": True}))[0])
        frames = send_frames(a, frame_tensor(0, LARGE))
        for frame in frames:
            b.receive(frame)
        before = a.unacknowledged_bytes
        assert before >= sum(map(len, frames))
        events = a.receive(join_packet(b.build_heartbeat()))
        assert [type(event) for event in events] == [Acknowledged]
        assert events[0].bytes == before and a.unacknowledged_bytes == 0

    def test_acknowledgement_is_due_after_many_unanswered_bytes(self) -> None:
        a, b = open_pair(stepping=True)
        for slot in range(ACK_BYTES // CHUNK_BYTES):
            assert b.take_acknowledgement() is None
            b.receive(send_frames(a, frame_tensor(0, np.zeros(CHUNK_BYTES, np.uint8), slot=slot))[0])
        packet = b.take_acknowledgement()
        assert packet is not None and read_header(packet[0]).kind == Kind.ACK
        assert b.take_acknowledgement() is None
        assert a.receive(join_packet(packet))[0].frames == ACK_BYTES // CHUNK_BYTES

    def test_small_budget_of_peer_is_acknowledged_earlier(self) -> None:
        a, b = make_conversation(0, budget=4000), make_conversation(1)
        greet(a, b)
        b.receive(send_frames(a, frame_message(0, STEP))[0])
        assert b.take_acknowledgement() is None
        b.receive(send_frames(a, frame_tensor(0, np.zeros(1000, np.uint8)))[0])
        assert b.take_acknowledgement() is not None

    def test_early_frames_are_acknowledged_once_they_are_in_order(self) -> None:
        """An acknowledgement that only repeats the previous number leaves the sender without room until a heartbeat."""
        a, b = make_conversation(0, budget=4000), make_conversation(1, window=1 << 20)
        greet(a, b)
        b.receive(send_frames(a, frame_message(0, STEP))[0])
        first, *later_frames = send_frames(
            a, [*frame_tensor(0, SMALL), *frame_tensor(0, np.zeros(1500, np.uint8)), *frame_tensor(0, SMALL)]
        )
        for frame in later_frames:
            b.receive(frame)
            assert b.take_acknowledgement() is None
        b.receive(first)
        packet = b.take_acknowledgement()
        assert packet is not None
        a.receive(join_packet(packet))
        assert a.unacknowledged_bytes == 0

    @pytest.mark.parametrize("last", [BYE, FAIL], ids=["bye", "fail"])
    def test_bye_and_fail_are_acknowledged_at_once(self, last: dict[str, Any]) -> None:
        a, b = open_pair(stepping=True)
        b.receive(send_frames(a, frame_message(0, last))[0])
        packet = b.take_acknowledgement()
        assert packet is not None
        a.receive(join_packet(packet))
        assert a.unacknowledged_bytes == 0 and b.take_acknowledgement() is None

    def test_sender_stalls_until_the_full_receiver_has_room(self) -> None:
        has_room = [False]
        a, b = make_conversation(0, budget=8000), make_conversation(1, accepts_data=lambda: has_room[0])
        greet(a, b)
        b.receive(send_frames(a, frame_message(0, STEP))[0])
        frames = [frame_tensor(0, np.full(1000, slot, np.uint8), slot=slot)[0] for slot in range(12)]
        received_contents: list[bytes] = []
        while a.room > 0:
            received_contents += read_contents(b.receive(send_frames(a, [frames.pop(0)])[0]))
            assert b.take_acknowledgement() is None
            a.receive(join_packet(b.build_heartbeat()))  # acknowledges nothing new
        assert len(received_contents) < 8 and a.unacknowledged_bytes > 0
        disconnect_all(a, b)
        assert greet(a, b)[0] == [Opened([], resumed=True)]  # nothing is resent
        assert a.room <= 0
        has_room[0] = True
        packet = b.take_acknowledgement()
        assert packet is not None
        a.receive(join_packet(packet))
        assert a.unacknowledged_bytes == 0
        for frame in frames:
            received_contents += read_contents(b.receive(send_frames(a, [frame])[0]))
            if packet := b.take_acknowledgement():
                a.receive(join_packet(packet))
        assert received_contents == [bytes([slot]) * 1000 for slot in range(12)]

    def test_sender_beyond_its_budget_is_refused(self) -> None:
        """On later connections as well: reconnecting does not make room."""
        a, b = make_conversation(0), make_conversation(1, budget=8000, accepts_data=lambda: False)
        greet(a, b)
        a._sent.budget = 1 << 40  # the sender ignores its limit
        b.receive(send_frames(a, frame_message(0, STEP))[0])
        with pytest.raises(RemoteProtocolError, match="bytes are not acknowledged"):
            for slot in range(100):
                b.receive(send_frames(a, frame_tensor(0, np.zeros(CHUNK_BYTES, np.uint8), slot=slot))[0])
        received_frames = b.expected_number
        assert received_frames < 20
        for _ in range(2):
            disconnect_all(a, b)
            resent_frames = greet(a, b)[0][-1].resend
            with pytest.raises(RemoteProtocolError, match="bytes are not acknowledged"):
                b.receive(join_packet(resent_frames[0]))
            assert b.expected_number == received_frames

    def test_bye_is_acknowledged_while_the_receiver_is_full(self) -> None:
        a, b = open_pair(stepping=True, accepts_data=lambda: False)
        b.receive(send_frames(a, frame_tensor(0, SMALL))[0])
        b.receive(send_frames(a, frame_message(0, BYE))[0])
        packet = b.take_acknowledgement()
        assert packet is not None
        a.receive(join_packet(packet))
        assert a.unacknowledged_bytes == 0

    def test_tensors_stall_without_room_but_messages_do_not(self) -> None:
        a, b = open_pair(stepping=True, budget=1000)
        frames = [*send_frames(a, frame_tensor(0, np.zeros(1000, np.uint8)))]
        assert a.room <= 0
        with pytest.raises(LocalProtocolError, match="not acknowledged"):
            a.build_frame(*frame_tensor(0, SMALL)[0])
        frames += send_frames(a, frame_message(0, FAIL))
        for frame in frames:
            b.receive(frame)
        a.receive(join_packet(b.take_acknowledgement() or b.build_heartbeat()))
        assert a.room == 1000

    def test_acknowledgement_of_unsent_frames_is_refused(self) -> None:
        a, b = open_pair(stepping=True)
        beat = join_packet(b.build_heartbeat())
        with pytest.raises(RemoteProtocolError, match="only 1 were sent"):
            a.receive(replace_fields(beat, ack=3))

    @pytest.mark.parametrize("fields", [{"sequence": 1}, {"step": 1}, {"dims": (1,)}, {"flags": 0}], ids=str)
    def test_heartbeat_with_other_fields_is_refused(self, fields: dict[str, Any]) -> None:
        a, b = open_pair()
        with pytest.raises(RemoteProtocolError, match="fields that an acknowledgement cannot have"):
            a.receive(replace_fields(join_packet(b.build_heartbeat()), **fields))


class TestReconnection:
    def test_gap_is_refused_and_frames_are_resent_after_reconnection(self) -> None:
        a, b = open_pair(stepping=True)
        first, second = send_frames(a, [*frame_tensor(0, SMALL), *frame_tensor(0, SMALL, slot=1)])
        with pytest.raises(RemoteProtocolError, match="received frame 3, but expected frame 2"):
            b.receive(second)
        disconnect_all(a, b)
        resent_frames = [join_packet(packet) for packet in greet(a, b)[0][-1].resend]
        assert resent_frames == [first, second]

    @pytest.mark.parametrize("early", [False, True], ids=["delivered", "early"])
    def test_duplicate_frame_is_refused_on_one_connection_only(self, early: bool) -> None:
        a, b = make_conversation(0), make_conversation(1, window=1 << 20)
        greet(a, b)
        b.receive(send_frames(a, frame_message(0, STEP))[0])
        frames = send_frames(a, [*frame_tensor(0, SMALL), *frame_tensor(0, SMALL, slot=1)])
        b.receive(frames[early])
        with pytest.raises(RemoteProtocolError, match=f"frame {2 + early} was received twice over one connection"):
            b.receive(frames[early])
        disconnect_all(a, b)
        resent_frames = [join_packet(packet) for packet in greet(a, b)[0][-1].resend]
        assert resent_frames == frames[not early :]
        assert len([event for frame in resent_frames for event in b.receive(frame)]) == len(resent_frames)

    def test_restarted_worker_is_refused_as_another_process(self) -> None:
        _, b = open_pair(stepping=True)
        disconnect_all(b)
        fresh = make_conversation(0)
        with pytest.raises(
            RemoteProtocolError, match=r"expects frame 2, but frames 1 to 0 are stored(.|\n)*another process"
        ):
            greet(fresh, b)

    def test_request_for_acknowledged_frames_is_refused(self) -> None:
        a, b = open_pair(stepping=True)
        a.receive(join_packet(b.build_heartbeat()))
        disconnect_all(a, b)
        restarted_peer = make_conversation(1, greeting=b._handshake._greeting)
        with pytest.raises(RemoteProtocolError, match="expects frame 1, but frames 2 to 1 are stored"):
            greet(a, restarted_peer)

    def test_frame_of_another_conversation_is_refused(self) -> None:
        _, b = open_pair()
        old, _ = open_pair()
        with pytest.raises(RemoteProtocolError, match="of conversation"):
            b.receive(send_frames(old, frame_message(0, STEP))[0])


class TestDamage:
    @SEALED
    def test_damaged_frame_is_refused_and_resent(self, sealed: bool) -> None:
        a, b = open_pair(stepping=True, sealed=sealed)
        frames = send_frames(a, frame_tensor(0, LARGE))
        b.receive(frames[0])
        for damaged in (frames[1][:-1], frames[1] + b"x", b"", frames[1][:50], frames[1][:-1] + b"\xff"):
            with pytest.raises(DamagedFrameError):
                b.receive(damaged)
            with pytest.raises(DamagedFrameError):
                b.receive(frames[1])  # the connection is not trusted any more
            disconnect_all(a, b)
            assert [join_packet(packet) for packet in greet(a, b)[0][-1].resend] == frames[1:]
        events = [event for frame in frames[1:] for event in b.receive(frame)]
        assert events[0].array.tobytes() == LARGE.tobytes()

    def test_forged_frame_with_valid_checksums_fails_its_seal(self) -> None:
        a, b = open_pair(stepping=True, sealed=True)
        frames = send_frames(a, frame_tensor(0, LARGE))
        body = bytearray(frames[0][HEADER_BYTES:])
        body[7] ^= 1
        header = read_header(frames[0], sealed=True)
        with pytest.raises(DamagedFrameError, match="seal of frame 2"):
            b.receive(pack_header(header, compute_checksum(np.frombuffer(body, np.uint8)), sealed=True) + body)
        disconnect_all(a, b)
        events = [event for packet in greet(a, b)[0][-1].resend for event in b.receive(join_packet(packet))]
        assert events[0].array.tobytes() == LARGE.tobytes()


class TestReordering:
    """Frames that arrive out of order; `test_conversation_machine` tests all orders."""

    def test_events_before_an_invalid_held_frame_are_delivered(self) -> None:
        a, b = open_pair(window=1 << 20, stepping=True)
        frames = [
            *send_frames(a, frame_tensor(0, SMALL)),
            replace_fields(send_frames(a, frame_tensor(0, SMALL, slot=1))[0], step=9),
        ]
        b.receive(frames[1])
        assert list(read_contents(b.receive(frames[0]))) == [SMALL.tobytes()]
        with pytest.raises(RemoteProtocolError, match="a tensor of step 9"):
            b.receive(join_packet(a.build_heartbeat()))
