"""The conversation: greetings, numbers, acknowledgements, cuts, and forbidden actions of each side."""

from typing import Any

import numpy as np
import pytest

from tests.unit.wire.talk import (
    BYE,
    FAIL,
    NAMES,
    STEP,
    SharedSecret,
    changed,
    contents,
    conversation,
    cut,
    greet,
    greeting,
    header_of,
    opened,
    pair,
    said,
    sent,
    tensor,
    whole,
)
from whale_nebula.errors import DamagedFrameError, LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.buffers import Acknowledged, Bound
from whale_nebula.wire.conversation import ACK_BYTES, Opened
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Flag, Header, Kind, checksum, pack
from whale_nebula.wire.message import State, build_message
from whale_nebula.wire.tensor import dtype_code

SMALL = np.arange(5, dtype=np.float32)
LARGE = np.arange(3 * CHUNK_BYTES // 8 + 11, dtype=np.int64)  # four frames
SEALED = pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])


ILLEGAL = {
    "a tensor before a step": (False, tensor(0, SMALL), "TENSOR in state OPEN"),
    "a tensor of another step": (True, tensor(0, SMALL, step=1), "a tensor of step 1 of program 7, but step 0"),
    "a tensor of another program": (True, tensor(0, SMALL, program=8), "of program 8"),
    "a shard": (True, tensor(0, SMALL, shard=1), "shard 1, but plans have no shards"),
    "a value in a step": (True, tensor(0, SMALL, kind=Kind.VALUE), "VALUE in state STEPPING"),
    "a second init": (True, said(0, {"kind": "SESSION", "about": "HELLO"}), "INIT in state STEPPING"),
    "lines without an agreement": (True, said(0, {"kind": "SESSION", "about": "LINES", "lines": []}), "LINES in state"),
    "an unknown session message": (True, said(0, {"kind": "SESSION", "about": "X"}), "SESSION in state"),
    "a greeting of the wire": (True, said(0, {"kind": "HELLO"}), "HELLO in state STEPPING"),
    "a step without numbers": (True, said(0, {"kind": "SESSION", "about": "STEP"}), "without valid numbers"),
}


class TestGreeting:
    @SEALED
    def test_both_are_ready_once_both_have_proven_themselves(self, sealed: bool) -> None:
        a, b = pair(sealed=sealed)
        assert not a.ready and a.number == 0
        assert greet(a, b) == ([Opened([], resumed=False)], [Opened([], resumed=False)])
        assert a.ready and b.ready and a.number == b.number != 0
        assert a.states == b.states == (State.OPEN, State.OPEN)

    def test_certificates_are_verified_on_both_sides(self) -> None:
        provers = [SharedSecret(name, certificate=f"that of {name}") for name in NAMES]
        a, b = (conversation(side, prover=prover) for side, prover in enumerate(provers))
        greet(a, b)
        assert [prover.verified for prover in provers] == [[("that of npu/0", "npu/0")], [("that of gpu/0", "gpu/0")]]

    @pytest.mark.parametrize("error", [ValueError("\ud800\n"), TypeError("no text"), KeyError("x")], ids=repr)
    def test_whatever_reading_it_raises_is_the_other_sides_mistake(self, error: Exception) -> None:
        class Unreadable(SharedSecret):
            def verify(self, *given: object) -> None:
                raise error

        a, b = conversation(0, prover=Unreadable(NAMES[0])), conversation(1, proven=True)
        with pytest.raises(RemoteProtocolError, match="cannot decode a received frame") as caught:
            greet(a, b)
        assert type(error).__name__ in caught.value.why
        assert caught.value.why.isprintable()
        assert not a.ready and a.error is caught.value

    def test_nothing_is_sent_before_it_is_over(self) -> None:
        a, _ = pair()
        for _ in range(2):
            with pytest.raises(LocalProtocolError, match="before the greeting is complete"):
                a.frame(*said(0, STEP)[0])
            with pytest.raises(LocalProtocolError, match="before the greeting is complete"):
                a.beat()
            assert a.due() is None
            if not a._connected:
                a.connect()

    def test_nothing_is_taken_before_it_is_over(self) -> None:
        a, b = opened()
        frame = sent(a, said(0, STEP))[0]
        cut(b)
        b.connect()
        with pytest.raises(RemoteProtocolError, match="before the greeting was complete"):
            b.receive(frame)

    def test_without_a_connection_nothing_is_taken_and_two_are_none(self) -> None:
        a, b = pair()
        hello = whole(b.connect()[0])
        with pytest.raises(LocalProtocolError, match="without a connection"):
            a.receive(hello)
        a.connect()
        with pytest.raises(LocalProtocolError, match="already"):
            a.connect()

    def test_a_greeting_is_said_once(self) -> None:
        a, b = pair()
        a.connect()
        hello = whole(b.connect()[0])
        a.receive(hello)
        with pytest.raises(RemoteProtocolError, match="HELLO in state GREETED"):
            a.receive(hello)

    @pytest.mark.parametrize(
        "fields",
        [{"sequence": 1}, {"ack": 1}, {"step": 1}, {"kind": Kind.SCALAR}, {"dtype": dtype_code("bool")}],
        ids=str,
    )
    def test_a_greeting_has_no_number_and_nothing_else(self, fields: dict[str, int]) -> None:
        a, b = pair()
        a.connect()
        with pytest.raises(RemoteProtocolError):
            a.receive(changed(whole(b.connect()[0]), **fields))

    def test_a_long_greeting_is_refused(self) -> None:
        a = conversation(0)
        a.connect()
        b = conversation(1, greeting=greeting(1, versions={str(n): "x" * 40_000 for n in range(2)}))
        with pytest.raises(RemoteProtocolError, match="is not a greeting"):
            a.receive(whole(b.connect()[0]))

    def test_other_messages_are_no_greeting(self) -> None:
        a, _ = pair()
        a.connect()
        header, chunk = said(1, BYE)[0]
        with pytest.raises(RemoteProtocolError, match="BYE in state START"):
            a.receive(pack(header, checksum(chunk)) + chunk.tobytes())

    @pytest.mark.parametrize(("here", "there"), [(1, 0), (0, 2)], ids=["back", "to another"])
    def test_frames_of_others_are_refused(self, here: int, there: int) -> None:
        a, b = pair()
        a.connect()
        with pytest.raises(RemoteProtocolError, match="on the link from worker 1 to worker 0"):
            a.receive(changed(whole(b.connect()[0]), source=there, destination=here))


class TestFrames:
    @SEALED
    def test_tensors_and_messages_arrive(self, sealed: bool) -> None:
        a, b = opened(sealed=sealed)
        frames = [*said(0, STEP), *tensor(0, LARGE), *tensor(0, np.zeros(0)), *tensor(0, np.array(True))]
        events = [event for frame in sent(a, frames) for event in b.receive(frame)]
        assert list(contents(events)) == [STEP, LARGE.tobytes(), b"", b"\x01"]
        assert (events[1].array.dtype, events[1].array.shape) == (LARGE.dtype, LARGE.shape)
        assert not any(event.header.flags & Flag.SEALED for event in events)

    def test_a_frame_that_is_not_sealed_is_refused_where_all_are(self) -> None:
        a, b = opened(sealed=True)
        header, chunk = said(0, STEP)[0]
        forged = pack(header._replace(sequence=1, conversation=a.number, ack=1), checksum(chunk)) + chunk.tobytes()
        with pytest.raises(RemoteProtocolError, match="unsealed frame on a sealed link"):
            b.receive(forged)

    def test_a_large_tensor_is_copied_once_into_its_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = opened(stepping=True)
        made: list[int] = []
        plain = np.empty
        monkeypatch.setattr(np, "empty", lambda shape, *rest: made.append(int(np.prod(shape))) or plain(shape, *rest))
        for frame in sent(a, tensor(0, LARGE)):
            events = b.receive(frame)
        assert made == [LARGE.nbytes]
        assert np.shares_memory(events[0].array, events[0].array.base)

    def test_a_tensor_of_one_frame_is_not_copied(self) -> None:
        a, b = opened(stepping=True)
        kept, changeable = sent(a, tensor(0, SMALL) + tensor(0, SMALL, slot=1))
        *_, event = b.receive(kept)
        assert np.shares_memory(event.array, np.frombuffer(kept, np.uint8)) and not event.array.flags.writeable
        held = bytearray(changeable)
        *_, event = b.receive(held)
        held[:] = bytes(len(held))
        np.testing.assert_array_equal(event.array, SMALL)

    def test_the_plan_is_asked_before_anything_is_allocated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Header] = []

        def expect(header: Header) -> Bound:
            asked.append(header)
            return Bound("float32", (3,))

        a, b = opened(stepping=True, expect=expect)
        monkeypatch.setattr(np, "empty", lambda *size: pytest.fail("allocated"))
        with pytest.raises(RemoteProtocolError, match="plan expects float32"):
            b.receive(sent(a, tensor(0, SMALL, slot=4))[0])
        assert [header.slot for header in asked] == [4]

    def test_a_tensor_above_the_limit_is_refused(self) -> None:
        a, b = opened(stepping=True, limit=100)
        with pytest.raises(RemoteProtocolError, match="limit of 100"):
            b.receive(sent(a, tensor(0, np.zeros(101, np.uint8)))[0])

    def test_messages_go_between_the_chunks_of_a_tensor(self) -> None:
        a, b = opened(stepping=True)
        chunk = tensor(0, LARGE)
        frames = sent(a, [chunk[0], *said(0, FAIL), *chunk[1:]])
        events = [event for frame in frames for event in b.receive(frame)]
        assert list(contents(events)) == [FAIL, LARGE.tobytes()]


class TestWhatIsLegal:
    """The same rules for both sides: who breaks them is told, here as its own mistake, there as the other's."""

    @pytest.mark.parametrize(("stepping", "frames", "words"), ILLEGAL.values(), ids=ILLEGAL.keys())
    def test_what_is_not_in_the_table_is_neither_sent_nor_taken(
        self, stepping: bool, frames: list[Any], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = opened(stepping=stepping)
        with pytest.raises(LocalProtocolError, match=words):
            a.frame(*frames[0])
        with monkeypatch.context() as patch:
            patch.setattr("whale_nebula.wire.conversation.speak", lambda side, *rest: side)
            (frame,) = sent(a, frames)
        with pytest.raises(RemoteProtocolError, match=words):
            b.receive(frame)

    def test_lines_are_not_parsed_where_programs_are_not_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = opened(stepping=True)
        with monkeypatch.context() as patch:
            patch.setattr("whale_nebula.wire.conversation.speak", lambda side, *rest: side)
            lines = build_message("SESSION", "LINES", program="p", lines=["x"] * 9)
            (frame,) = sent(a, said(0, lines))
        monkeypatch.setattr("whale_nebula.wire.conversation.decode_message", lambda _: pytest.fail("it was parsed"))
        with pytest.raises(RemoteProtocolError, match="LINES in state STEPPING"):
            b.receive(frame)

    def test_what_may_not_be_sent_changes_nothing(self) -> None:
        a, b = opened(stepping=True)
        before = a.unacked, a.states
        for frames in (tensor(0, SMALL, step=3), tensor(1, SMALL), said(0, {"kind": "HELLO"})):
            with pytest.raises(LocalProtocolError):
                a.frame(*frames[0])
        assert (a.unacked, a.states) == before
        assert list(contents(b.receive(sent(a, tensor(0, SMALL))[0]))) == [SMALL.tobytes()]

    def test_headers_and_chunks_fit_each_other(self) -> None:
        a, _ = opened(stepping=True)
        header, chunk = tensor(0, SMALL)[0]
        for wrong in (
            (header, chunk[:-1]),
            (header._replace(whole=21), chunk),
            (Header(Kind.BEAT, destination=1, flags=Flag.LAST), chunk[:0]),
            (header._replace(destination=2), chunk),
            (header._replace(flags=Flag.LAST | Flag.SEALED), chunk),
        ):
            with pytest.raises(LocalProtocolError, match="invalid outgoing frame"):
                a.frame(*wrong)
        junk = np.frombuffer(b"no json", np.uint8)
        with pytest.raises(LocalProtocolError, match="not JSON"):
            a.frame(said(0, {"kind": "PING", "last": True})[0][0]._replace(length=7, whole=7, dims=(7,)), junk)

    def test_after_bye_only_a_failure_is_sent(self) -> None:
        a, b = opened(stepping=True)
        b.receive(sent(a, said(0, BYE))[0])
        assert b.states == (State.STEPPING, State.DRAINED)
        with pytest.raises(LocalProtocolError, match="in state DRAINED"):
            a.frame(*tensor(0, SMALL)[0])
        assert list(contents(b.receive(sent(a, said(0, FAIL))[0]))) == [FAIL]


class TestAcknowledgements:
    @SEALED
    def test_what_arrived_is_let_go(self, sealed: bool) -> None:
        a, b = opened(stepping=True, sealed=sealed)
        a.receive(sent(b, said(1, {"kind": "PING", "last": True}))[0])
        frames = sent(a, tensor(0, LARGE))
        for frame in frames:
            b.receive(frame)
        before = a.unacked
        assert before >= sum(map(len, frames))
        events = a.receive(whole(b.beat()))
        assert [type(event) for event in events] == [Acknowledged]
        assert events[0].bytes == before and a.unacked == 0

    def test_an_acknowledgement_is_due_after_many_bytes_without_an_answer(self) -> None:
        a, b = opened(stepping=True)
        for slot in range(ACK_BYTES // CHUNK_BYTES):
            assert b.due() is None
            b.receive(sent(a, tensor(0, np.zeros(CHUNK_BYTES, np.uint8), slot=slot))[0])
        packet = b.due()
        assert packet is not None and header_of(packet[0]).kind == Kind.ACK
        assert b.due() is None
        assert a.receive(whole(packet))[0].frames == ACK_BYTES // CHUNK_BYTES

    def test_a_small_budget_of_the_other_side_is_acknowledged_earlier(self) -> None:
        a, b = conversation(0, budget=4000), conversation(1)
        greet(a, b)
        b.receive(sent(a, said(0, STEP))[0])
        assert b.due() is None
        b.receive(sent(a, tensor(0, np.zeros(1000, np.uint8)))[0])
        assert b.due() is not None

    def test_frames_that_waited_for_one_before_them_are_acknowledged_when_they_are_taken(self) -> None:
        """To say again that nothing has come in order leaves a sender without room, and it waits for a beat."""
        a, b = conversation(0, budget=4000), conversation(1, window=1 << 20)
        greet(a, b)
        b.receive(sent(a, said(0, STEP))[0])
        first, *others = sent(a, [*tensor(0, SMALL), *tensor(0, np.zeros(1500, np.uint8)), *tensor(0, SMALL)])
        for frame in others:
            b.receive(frame)
            assert b.due() is None
        b.receive(first)
        packet = b.due()
        assert packet is not None
        a.receive(whole(packet))
        assert a.unacked == 0

    @pytest.mark.parametrize("last", [BYE, FAIL], ids=["bye", "fail"])
    def test_the_end_is_acknowledged_at_once(self, last: dict[str, Any]) -> None:
        a, b = opened(stepping=True)
        b.receive(sent(a, said(0, last))[0])
        packet = b.due()
        assert packet is not None
        a.receive(whole(packet))
        assert a.unacked == 0 and b.due() is None

    def test_who_is_held_stalls_and_goes_on_once_it_is_let(self) -> None:
        open_now = [False]
        a, b = conversation(0, budget=8000), conversation(1, flows=lambda: open_now[0])
        greet(a, b)
        b.receive(sent(a, said(0, STEP))[0])
        frames = [tensor(0, np.full(1000, slot, np.uint8), slot=slot)[0] for slot in range(12)]
        taken: list[bytes] = []
        while a.room() > 0:
            taken += contents(b.receive(sent(a, [frames.pop(0)])[0]))
            assert b.due() is None
            a.receive(whole(b.beat()))  # it says nothing new
        assert len(taken) < 8 and a.unacked > 0
        cut(a, b)
        assert greet(a, b)[0] == [Opened([], resumed=True)]  # nor does another connection, but nothing comes twice
        assert a.room() <= 0
        open_now[0] = True
        packet = b.due()
        assert packet is not None
        a.receive(whole(packet))
        assert a.unacked == 0
        for frame in frames:
            taken += contents(b.receive(sent(a, [frame])[0]))
            if packet := b.due():
                a.receive(whole(packet))
        assert taken == [bytes([slot]) * 1000 for slot in range(12)]

    def test_who_sends_more_than_its_budget_is_refused(self) -> None:
        """On the next connection too: no cut makes room."""
        a, b = conversation(0), conversation(1, budget=8000, flows=lambda: False)
        greet(a, b)
        a._replay.budget = 1 << 40  # it keeps to none
        b.receive(sent(a, said(0, STEP))[0])
        with pytest.raises(RemoteProtocolError, match="bytes are not acknowledged"):
            for slot in range(100):
                b.receive(sent(a, tensor(0, np.zeros(CHUNK_BYTES, np.uint8), slot=slot))[0])
        stopped = b.received
        assert stopped < 20
        for _ in range(2):
            cut(a, b)
            again = greet(a, b)[0][-1].resend
            with pytest.raises(RemoteProtocolError, match="bytes are not acknowledged"):
                b.receive(whole(again[0]))
            assert b.received == stopped

    def test_an_end_is_acknowledged_to_who_is_held(self) -> None:
        a, b = opened(stepping=True, flows=lambda: False)
        b.receive(sent(a, tensor(0, SMALL))[0])
        b.receive(sent(a, said(0, BYE))[0])
        packet = b.due()
        assert packet is not None
        a.receive(whole(packet))
        assert a.unacked == 0

    def test_without_room_tensors_stall_and_messages_do_not(self) -> None:
        a, b = opened(stepping=True, budget=1000)
        frames = [*sent(a, tensor(0, np.zeros(1000, np.uint8)))]
        assert a.room() <= 0
        with pytest.raises(LocalProtocolError, match="not acknowledged"):
            a.frame(*tensor(0, SMALL)[0])
        frames += sent(a, said(0, FAIL))
        for frame in frames:
            b.receive(frame)
        a.receive(whole(b.due() or b.beat()))
        assert a.room() == 1000

    def test_more_than_was_sent_is_not_acknowledged(self) -> None:
        a, b = opened(stepping=True)
        beat = whole(b.beat())
        with pytest.raises(RemoteProtocolError, match="only 1 were sent"):
            a.receive(changed(beat, ack=3))

    @pytest.mark.parametrize("fields", [{"sequence": 1}, {"step": 1}, {"dims": (1,)}, {"flags": 0}], ids=str)
    def test_a_beat_says_nothing_else(self, fields: dict[str, Any]) -> None:
        a, b = opened()
        with pytest.raises(RemoteProtocolError, match="fields other than an acknowledgement"):
            a.receive(changed(whole(b.beat()), **fields))


class TestCuts:
    def test_a_gap_is_refused_and_mends_with_a_new_connection(self) -> None:
        a, b = opened(stepping=True)
        first, second = sent(a, [*tensor(0, SMALL), *tensor(0, SMALL, slot=1)])
        with pytest.raises(RemoteProtocolError, match="received frame 3, but expected frame 2"):
            b.receive(second)
        cut(a, b)
        again = [whole(packet) for packet in greet(a, b)[0][-1].resend]
        assert again == [first, second]

    @pytest.mark.parametrize("held", [False, True], ids=["taken", "held"])
    def test_what_comes_twice_is_refused_on_one_connection_and_taken_from_the_next(self, held: bool) -> None:
        a, b = conversation(0), conversation(1, window=1 << 20)
        greet(a, b)
        b.receive(sent(a, said(0, STEP))[0])
        frames = sent(a, [*tensor(0, SMALL), *tensor(0, SMALL, slot=1)])
        b.receive(frames[held])
        with pytest.raises(RemoteProtocolError, match=f"frame {2 + held} was received twice over one connection"):
            b.receive(frames[held])
        cut(a, b)
        again = [whole(packet) for packet in greet(a, b)[0][-1].resend]
        assert again == frames[not held :]
        assert len([event for frame in again for event in b.receive(frame)]) == len(again)

    def test_a_restarted_worker_learns_that_it_is_not_the_one_of_before(self) -> None:
        _, b = opened(stepping=True)
        cut(b)
        fresh = conversation(0)
        with pytest.raises(
            RemoteProtocolError, match=r"expects frame 2, but frames 1 to 0 are stored(.|\n)*another process"
        ):
            greet(fresh, b)

    def test_what_was_acknowledged_is_not_asked_for_again(self) -> None:
        a, b = opened(stepping=True)
        a.receive(whole(b.beat()))
        cut(a, b)
        forgetful = conversation(1, greeting=b._introduction._greeting)
        with pytest.raises(RemoteProtocolError, match="expects frame 1, but frames 2 to 1 are stored"):
            greet(a, forgetful)

    def test_frames_of_an_earlier_run_are_stale(self) -> None:
        _, b = opened()
        old, _ = opened()
        with pytest.raises(RemoteProtocolError, match="of conversation"):
            b.receive(sent(old, said(0, STEP))[0])


class TestDamage:
    @SEALED
    def test_a_damaged_frame_changes_nothing_and_comes_again(self, sealed: bool) -> None:
        a, b = opened(stepping=True, sealed=sealed)
        frames = sent(a, tensor(0, LARGE))
        b.receive(frames[0])
        for damaged in (frames[1][:-1], frames[1] + b"x", b"", frames[1][:50], frames[1][:-1] + b"\xff"):
            with pytest.raises(DamagedFrameError):
                b.receive(damaged)
            with pytest.raises(DamagedFrameError):
                b.receive(frames[1])  # the connection is not trusted any more
            cut(a, b)
            assert [whole(packet) for packet in greet(a, b)[0][-1].resend] == frames[1:]
        events = [event for frame in frames[1:] for event in b.receive(frame)]
        assert events[0].array.tobytes() == LARGE.tobytes()

    def test_a_forged_frame_with_right_checksums_breaks_on_its_seal(self) -> None:
        a, b = opened(stepping=True, sealed=True)
        frames = sent(a, tensor(0, LARGE))
        body = bytearray(frames[0][HEADER_BYTES:])
        body[7] ^= 1
        header = header_of(frames[0], sealed=True)
        with pytest.raises(DamagedFrameError, match="seal of frame 2"):
            b.receive(pack(header, checksum(np.frombuffer(body, np.uint8)), sealed=True) + body)
        cut(a, b)
        events = [event for packet in greet(a, b)[0][-1].resend for event in b.receive(whole(packet))]
        assert events[0].array.tobytes() == LARGE.tobytes()


class TestSeveralConnections:
    """Frames that overtake one another; `test_conversation_machine` has them in every order."""

    def test_what_came_before_a_bad_held_frame_is_not_lost(self) -> None:
        a, b = opened(window=1 << 20, stepping=True)
        frames = [*sent(a, tensor(0, SMALL)), changed(sent(a, tensor(0, SMALL, slot=1))[0], step=9)]
        b.receive(frames[1])
        assert list(contents(b.receive(frames[0]))) == [SMALL.tobytes()]
        with pytest.raises(RemoteProtocolError, match="a tensor of step 9"):
            b.receive(whole(a.beat()))
