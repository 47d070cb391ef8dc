"""The two halves of a relayed link in every order: pairing, joint failure, and admission."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest

from tests.unit.gateway.town import GPU, NPU, until
from whale_nebula.errors import RemoteProtocolError, TransportError
from whale_nebula.gateway.relay import REPLACED, Half, Inspection, Pair, Side
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.connection import END, Connection, Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import FRAME_CAP, HEADER_BYTES, TAG_BYTES, Direction, Flag, Header, Kind, pack, unpack
from whale_nebula.wire.tensor import dtype_code

NEAR, FAR = Side.NEAR, Side.FAR


def beat(conversation: int = 1, source: int = 0) -> bytes:
    return pack(Header(Kind.BEAT, Flag.LAST, conversation=conversation, source=source, destination=1 - source), 0)


class Meeting:
    """A pair, and the halves that came to it."""

    def __init__(self, *, yields: bool = False) -> None:
        self.ended: list[tuple[Half, str]] = []
        self.now = 100.0
        self.pair = Pair(
            GPU,
            NPU,
            Inspection((0, 1)),
            lambda pair, half, why: self.ended.append((half, why)),
            yields=yields,
            now=lambda: self.now,
        )
        self.names = itertools.count()

    def half(self, side: Side, *, dialled: bool = False) -> tuple[Half, Lane]:
        lane = Lane()
        half = Half(
            side,
            side.value,
            Connection(f"{next(self.names):016x}"),
            lambda frame: self.pair.inspection.check(frame, outward=side is NEAR),
            dialled=dialled,
        )
        half.lane(0, lane)
        return half, lane

    def come(self, side: Side, *, dialled: bool = False) -> tuple[Half, Lane]:
        half, lane = self.half(side, dialled=dialled)
        self.pair.arrive(half)
        return half, lane


class TestBeingForgotten:
    def test_once_nobody_is_there_or_was_lately(self) -> None:
        meeting = Meeting()
        near, _ = meeting.come(NEAR)
        far, _ = meeting.come(FAR)
        meeting.now += 1000.0
        assert not meeting.pair.retire()  # they are there
        for half in (near, far):
            half.connection.end("a test")
        meeting.now += 29.0
        assert not meeting.pair.retire()  # they were there
        meeting.now += 2.0
        assert meeting.pair.retire()

    def test_not_while_somebody_is_on_the_way(self) -> None:
        meeting = Meeting()
        assert not meeting.pair.retire()
        meeting.now += 6.0
        meeting.pair.check_rate()
        assert not meeting.pair.retire()

    def test_it_takes_nobody_afterwards(self) -> None:
        meeting = Meeting()
        meeting.now += 6.0
        assert meeting.pair.retire()
        for attempt in (meeting.pair.check_rate, lambda: meeting.come(NEAR)):
            with pytest.raises(TransportError, match="was just removed"):
                attempt()

    def test_who_comes_too_often_is_told_so(self) -> None:
        meeting = Meeting()
        meeting.pair._arrivals = TokenBucket(3, 0.0)
        for _ in range(3):
            meeting.pair.check_rate()
        with pytest.raises(TransportError, match="too many new streams"):
            meeting.pair.check_rate()


class TestJoining:
    @pytest.mark.parametrize("order", [(NEAR, FAR), (FAR, NEAR)])
    def test_halves_in_any_order(self, order: tuple[Side, Side]) -> None:
        meeting = Meeting()
        one, _ = meeting.come(order[0])
        assert one.fresh
        other, _ = meeting.come(order[1])
        assert (one.partner, other.partner) == (other, one)

    def test_a_half_is_joined_once(self) -> None:
        meeting = Meeting()
        near, _ = meeting.come(NEAR)
        far, _ = meeting.come(FAR)
        second, _ = meeting.come(FAR)
        assert far.connection.over
        assert near.connection.over
        assert second.fresh
        third, _ = meeting.come(NEAR)
        assert third.partner is second

    def test_a_second_near_half_replaces_the_first(self) -> None:
        meeting = Meeting()
        first, _ = meeting.come(NEAR)
        second, _ = meeting.come(NEAR)
        assert meeting.ended == [(first, REPLACED)]
        far, _ = meeting.come(FAR)
        assert far.partner is second


class TestParting:
    @pytest.mark.parametrize("side", [NEAR, FAR])
    def test_both_halves_break_together(self, side: Side) -> None:
        meeting = Meeting()
        halves = {each: meeting.come(each)[0] for each in (NEAR, FAR)}
        halves[side].connection.end("the cable")
        assert halves[side.other].connection.over
        assert {half.side for half, _ in meeting.ended} == {NEAR, FAR}
        assert meeting.ended[-1][1] == "the cable" or meeting.ended[-1][1].endswith("the cable")

    def test_after_an_end_in_order_what_was_sent_still_arrives(self) -> None:
        meeting = Meeting()
        near, sent = meeting.come(NEAR)
        far, lane = meeting.come(FAR)
        sent.read([beat(), END], near.receive)
        assert near.connection.over
        assert not far.connection.over
        assert list(lane.outgoing()) == [beat(), END]

    def test_a_bad_frame_breaks_both_and_is_the_reason(self) -> None:
        meeting = Meeting()
        near, sent = meeting.come(NEAR)
        far, _ = meeting.come(FAR)
        sent.read([b"x" * 200], near.receive)
        assert far.connection.over
        assert near.fault.startswith("NB-412 not a frame of this protocol")

    def test_it_is_known_for_a_while_after_it_was_joined(self) -> None:
        meeting = Meeting()
        near, _ = meeting.come(NEAR)
        assert not meeting.pair.known
        meeting.come(FAR)
        assert meeting.pair.known
        near.connection.end("it is over")
        assert meeting.pair.known
        meeting.now += 60.0
        assert not meeting.pair.known


class TestTwoAttemptsThatCross:
    def meeting(self, **options: bool) -> tuple[Meeting, Half, Half]:
        """A worker has come, and its gateway is about to dial."""
        made = Meeting(**options)
        return made, made.come(NEAR)[0], made.half(FAR, dialled=True)[0]

    def test_while_ours_is_on_its_way_theirs_is_refused(self) -> None:
        meeting, near, half = self.meeting()
        with meeting.pair.attempt(half, near) as needed:
            assert needed
            for take in (meeting.pair.give_way, lambda: meeting.come(FAR)):
                with pytest.raises(TransportError, match="both gateways opened a stream"):
                    take()
            assert meeting.pair.reach(half, near)
        assert near.partner is half

    def test_ours_gives_way_once_it_takes_too_long_and_they_dial_again(self) -> None:
        """Its address may lead nowhere, and each attempt takes seconds: theirs would find no gap between two."""
        meeting, near, half = self.meeting()
        with meeting.pair.attempt(half, near):
            meeting.now += 1.5
            with pytest.raises(TransportError, match="both gateways opened a stream"):
                meeting.pair.give_way()
            meeting.now += 1.5
            meeting.pair.give_way()
            assert half.connection.over
            theirs, _ = meeting.come(FAR)
            assert not meeting.pair.reach(half, near)
        assert near.partner is theirs

    def test_who_yields_takes_theirs_and_drops_his_own(self) -> None:
        meeting, near, half = self.meeting(yields=True)
        with meeting.pair.attempt(half, near):
            meeting.pair.give_way()
            assert half.connection.over
            theirs, _ = meeting.come(FAR)
            assert not meeting.pair.reach(half, near)
        assert near.partner is theirs

    def test_theirs_is_late_once_ours_stands_but_not_if_they_insist(self) -> None:
        meeting, near, half = self.meeting()
        meeting.pair.reach(half, near)
        with pytest.raises(TransportError, match="both gateways opened a stream"):
            meeting.come(FAR)
        meeting.now += 1.0
        theirs, _ = meeting.come(FAR)
        assert half.connection.over
        assert meeting.pair.half(FAR) is theirs

    def test_what_was_heard_over_one_that_is_not_needed_holds_nobody(self) -> None:
        meeting = Meeting(yields=True)
        half, _ = meeting.half(FAR, dialled=True)
        frame = pack(Header(Kind.BEAT, Flag.LAST, conversation=1, source=1, destination=0), 0)
        reader = threading.Thread(target=half.receive, args=(frame,), daemon=True)
        reader.start()
        half.connection.end("it is not needed")
        reader.join(10.0)
        assert not reader.is_alive()


class TwoGateways:
    """Two gateways that dial each other, over a line with a clock of its own: `opening` seconds from the dial to the
    answer, `way` seconds for anything from one to the other.
    """

    def __init__(self, opening: float, way: float, draws: Random, *, nowhere: bool = False) -> None:
        self.opening, self.way, self.draws, self.nowhere = opening, way, draws, nowhere
        self.now, self.events, self.order = 0.0, [], itertools.count()
        self.pairs = {
            name: Pair(name, other, Inspection(), lambda *_: None, yields=name == GPU, now=lambda: self.now)
            for name, other in ((GPU, NPU), (NPU, GPU))
        }
        self.names = itertools.count()

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), act))

    def half(self, side: Side, name: str, *, dialled: bool = False) -> Half:
        half = Half(side, side.value, Connection(name), lambda frame: unpack(frame)[0], dialled=dialled)
        half.lane(0, Lane())
        return half

    def come(self, here: str) -> None:
        """A worker comes to its gateway, which dials for it; when that breaks it comes again."""
        near = self.half(NEAR, f"{next(self.names):016x}")
        self.pairs[here].arrive(near)
        near.connection.on_end(lambda why: self.later(0.05, lambda: self.come(here)))
        self.later(0.3 if self.pairs[here].yields else 0.0, lambda: self.dial(here, near, 0))

    def dial(self, here: str, near: Half, attempt: int) -> None:
        """As `Route._lead` does it."""
        if not near.fresh:
            return
        pair, there = self.pairs[here], NPU if here == GPU else GPU
        mine = self.half(FAR, f"{next(self.names):016x}", dialled=True)
        theirs = self.half(FAR, mine.connection.name)
        opening = contextlib.ExitStack()
        opening.enter_context(pair.attempt(mine, near))
        for one, other in ((mine, theirs), (theirs, mine)):
            one.connection.on_end(lambda why, other=other: self.later(self.way, lambda: other.connection.end(why)))

        def settle() -> None:
            opening.close()
            if not mine.connection.over and not pair.reach(mine, near):
                mine.connection.end("it is not needed")
            pause = Deadlines().retry_pause(min(attempt, 4), self.draws.random())
            self.later(pause, lambda: self.dial(here, near, attempt + 1))

        if self.nowhere and here == NPU:
            self.later(10.0, lambda: (mine.connection.end("too long"), settle()))
        else:
            self.later(self.opening - self.way, lambda: self.knock(there, theirs))
            self.later(self.opening, settle)

    def knock(self, here: str, half: Half) -> None:
        """As `Gateway._take` does it."""
        pair = self.pairs[here]
        if half.connection.over:  # it was given up before it was sent
            return
        try:
            if pair.half(NEAR) is None and not pair.known:
                raise TransportError("it has not come yet")
            pair.give_way()
            pair.arrive(half)
        except TransportError as error:
            half.connection.end(error.what)

    def met(self) -> bool:
        nears, fars = ([pair.half(side) for pair in self.pairs.values()] for side in (NEAR, FAR))
        joined = [near is not None and near.partner is far for near, far in zip(nears, fars, strict=True)]
        return all(joined) and len({far.connection.name for far in fars if far is not None}) == 1

    def run(self, seconds: float) -> float | None:
        """Since when they have been joined, after so many seconds."""
        since = None
        while self.events and self.events[0][0] < seconds:
            self.now, _, act = heapq.heappop(self.events)
            act()
            since = (self.now if since is None else since) if self.met() else None
        return since


class TestTwoGatewaysThatDialEachOther:
    @pytest.mark.parametrize("ways", [2, 4, 8], ids=lambda ways: f"{ways // 2} round trips")
    @pytest.mark.parametrize("opening", [0.1, 0.9, 1.4, 4.8])
    def test_they_meet_soon_however_long_opening_takes(self, opening: float, ways: int) -> None:
        took = []
        for seed in range(50):
            draws = Random(seed)
            both = TwoGateways(opening, opening / ways, draws)
            for here in (GPU, NPU):
                both.later(draws.random() * 1.5 * opening, partial(both.come, here))
            took.append(both.run(60.0) or 60.0)
        assert max(took) < 1.0 + 3 * opening

    @pytest.mark.parametrize("opening", [0.02, 0.4, 1.4])
    def test_an_address_that_leads_nowhere_does_not_hold_them_for_long(self, opening: float) -> None:
        took = []
        for seed in range(50):
            both = TwoGateways(opening, opening / 2, Random(seed), nowhere=True)
            for here in (GPU, NPU):
                both.later(Random(seed).random(), partial(both.come, here))
            took.append(both.run(60.0) or 60.0)
        assert max(took) < 2.0 + 2 * opening


class TestSeveralLanes:
    def test_a_lane_that_comes_twice_is_refused_and_not_kept(self) -> None:
        half, _ = Meeting().half(NEAR)
        half.lane(1, Lane())
        for _ in range(3):
            with pytest.raises(TransportError, match="lane 1 was opened twice"):
                half.lane(1, Lane())
        assert len(half._lanes) == 2

    def test_one_that_ends_in_order_makes_room_for_the_next(self) -> None:
        half, _ = Meeting().half(NEAR)
        for _ in range(5):
            lane = Lane()
            half.lane(1, lane)
            lane.in_order = True
            lane.end("in order")
        assert not half.connection.over
        assert len(half._lanes) == 2

    def test_numbered_frames_wait_for_the_greeting(self) -> None:
        meeting = Meeting()
        near, _ = meeting.come(NEAR)
        _, out = meeting.come(FAR)
        further = Lane()
        hear = near.lane(1, further)
        reader = threading.Thread(target=further.read, args=([beat(2), END], hear), daemon=True)
        reader.start()
        for conversation in (0, 0):
            near.receive(beat(conversation))
            assert next(out.outgoing()) == beat(0)
        reader.join(10.0)
        assert next(out.outgoing()) == beat(2)

    @pytest.mark.parametrize("side", [NEAR, FAR])
    def test_nothing_of_a_further_lane_is_read_before_the_greeting(self, side: Side) -> None:
        meeting = Meeting()
        halves = {each: meeting.come(each) for each in (NEAR, FAR)}
        half, out, further, read = halves[side][0], halves[side.other][1], Lane(), threading.Event()

        def incoming() -> Iterator[bytes]:
            read.set()
            yield END

        hear = half.lane(1, further)
        reader = threading.Thread(target=further.read, args=(incoming(), hear), daemon=True)
        reader.start()
        reader.join(0.05)
        assert not read.is_set()
        for _ in range(2):
            half.receive(beat(0, source=side is FAR))
            next(out.outgoing())
        reader.join(10.0)
        assert read.is_set() and further.in_order

    def test_and_are_let_go_when_it_breaks_before(self) -> None:
        meeting = Meeting()
        near, _ = meeting.come(NEAR)
        further = Lane()
        hear = near.lane(1, further)
        reader = threading.Thread(target=further.read, args=([beat(2), END], hear), daemon=True)
        reader.start()
        near.connection.end("a test")
        reader.join(10.0)
        assert not reader.is_alive()


def test_nothing_is_read_of_a_stranger_before_there_is_somebody_to_hand_it_to() -> None:
    meeting = Meeting()
    far, lane = meeting.come(FAR)
    events: list[str] = []

    def frames() -> Iterator[bytes]:
        events.append("read")
        yield from (beat(0, source=1), END)

    reader = threading.Thread(target=lane.read, args=(frames(), far.receive), daemon=True)
    reader.start()
    until(lambda: len(far._changed._waiters) == 1)  # type: ignore[attr-defined]
    events.append("joined")
    _, out = meeting.come(NEAR)
    assert next(out.outgoing()) == beat(0, source=1)
    reader.join(10.0)
    assert events == ["joined", "read"]


def test_a_half_that_waits_for_its_partner_is_not_quiet() -> None:
    meeting = Meeting()
    near, _ = meeting.come(NEAR)
    assert near.quiet(float("inf")) == float("inf")
    reader = threading.Thread(target=near.receive, args=(beat(),), daemon=True)
    reader.start()
    until(lambda: near.quiet(float("inf")) == 0.0)
    near.connection.end("a test")
    reader.join(10.0)


ROSTER = ("gpu/0", "npu/0", "npu/1")


def frame(
    source: int = 0,
    destination: int = 2,
    size: int = 40,
    *,
    sealed: bool = False,
    codec: int = 0,
    rows: int | None = None,
) -> bytes:
    length = size + TAG_BYTES * sealed
    header = Header(
        Kind.BOUNDARY,
        Flag.LAST | (Flag.SEALED if sealed else 0),
        conversation=7,
        source=source,
        destination=destination,
        length=length,
        whole=size,
        direction=Direction.FORWARD,
        dtype=dtype_code("float32"),
        codec=codec,
        state=3 if codec else 0,
        dims=(size // 4 if rows is None else rows,),
    )
    return pack(header, 1234, sealed=sealed) + bytes(length)


@pytest.mark.parametrize("sealed", [False, True])
def test_frames_of_the_pair_pass_both_ways(sealed: bool) -> None:
    pair = Inspection.of(ROSTER, "gpu/0", "npu/1")
    assert pair.check(frame(sealed=sealed), outward=True).conversation == 7
    assert pair.check(frame(2, 0, sealed=sealed), outward=False).source == 2


PAIR = Inspection.of(ROSTER, "gpu/0", "npu/1")
OTHERS = "which is not the pair of this stream"
REFUSED: dict[str, tuple[Inspection, bytes, bool, str]] = {
    "to another worker": (PAIR, frame(0, 1), True, OTHERS),
    "of another worker": (PAIR, frame(1, 2), True, OTHERS),
    "of the other end": (PAIR, frame(2, 0), True, OTHERS),
    "of this end": (PAIR, frame(0, 2), False, OTHERS),
    "to itself": (Inspection(), frame(1, 1), True, "to itself"),
    "no bytes": (PAIR, b"", True, "is not a frame"),
    "too few for a header": (PAIR, b"x" * (HEADER_BYTES - 1), True, "is not a frame"),
    "too many": (PAIR, bytes(FRAME_CAP + 1), True, "is not a frame"),
    "a byte more than its header says": (PAIR, frame() + b"x", True, "bytes in a frame of"),
    "a byte less than its header says": (PAIR, frame()[:-1], True, "bytes in a frame of"),
}


@pytest.mark.parametrize(("inspection", "data", "outward", "said"), REFUSED.values(), ids=REFUSED)
def test_other_frames_do_not(inspection: Inspection, data: bytes, outward: bool, said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=said):
        inspection.check(data, outward=outward)


def test_where_the_workers_are_not_known_the_first_frame_tells() -> None:
    pair = Inspection.of(None, "gpu/0", "npu/1")
    pair.check(frame(0, 2), outward=True)
    pair.check(frame(2, 0), outward=False)
    with pytest.raises(RemoteProtocolError, match="which is not the pair"):
        pair.check(frame(0, 1), outward=True)


def test_a_changed_payload_passes() -> None:
    """The worker finds it: it has the seal, or the checksum."""
    Inspection.of(ROSTER, "gpu/0", "npu/1").check(frame()[:-1] + b"\1", outward=True)
