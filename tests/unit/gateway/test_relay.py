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

from tests.unit.gateway.networks import GPU, NPU, wait_until
from whale_nebula.errors import RemoteProtocolError, TransportError
from whale_nebula.gateway.relay import REPLACED, Half, Inspection, Pair, Side
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.connection import END, Connection, Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.wire.frame import (
    FRAME_CAP,
    HEADER_BYTES,
    TAG_BYTES,
    Direction,
    Flag,
    Header,
    Kind,
    pack_header,
    unpack_header,
)
from whale_nebula.wire.tensor import find_dtype_code

NEAR, FAR = Side.NEAR, Side.FAR


def make_heartbeat(conversation: int = 1, source: int = 0) -> bytes:
    return pack_header(
        Header(Kind.BEAT, Flag.LAST, conversation=conversation, source=source, destination=1 - source), 0
    )


class PairHarness:
    """A pair with a settable clock, and the halves that are added to it."""

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

    def make_half(self, side: Side, *, dialled: bool = False) -> tuple[Half, Lane]:
        lane = Lane()
        half = Half(
            side,
            side.value,
            Connection(f"{next(self.names):016x}"),
            lambda frame: self.pair.inspection.check(frame, outward=side is NEAR),
            dialled=dialled,
        )
        half.add_lane(0, lane)
        return half, lane

    def add_half(self, side: Side, *, dialled: bool = False) -> tuple[Half, Lane]:
        half, lane = self.make_half(side, dialled=dialled)
        self.pair.add_half(half)
        return half, lane


class TestPairRetirement:
    def test_pair_retires_some_time_after_its_halves_end(self) -> None:
        harness = PairHarness()
        near, _ = harness.add_half(NEAR)
        far, _ = harness.add_half(FAR)
        harness.now += 1000.0
        assert not harness.pair.retire()  # the halves are open
        for half in (near, far):
            half.connection.end("a test")
        harness.now += 29.0
        assert not harness.pair.retire()  # they ended recently
        harness.now += 2.0
        assert harness.pair.retire()

    def test_pair_does_not_retire_soon_after_use(self) -> None:
        harness = PairHarness()
        assert not harness.pair.retire()
        harness.now += 6.0
        harness.pair.check_rate()
        assert not harness.pair.retire()

    def test_retired_pair_refuses_streams(self) -> None:
        harness = PairHarness()
        harness.now += 6.0
        assert harness.pair.retire()
        for attempt in (harness.pair.check_rate, lambda: harness.add_half(NEAR)):
            with pytest.raises(TransportError, match="was just removed"):
                attempt()

    def test_frequent_new_streams_are_refused(self) -> None:
        harness = PairHarness()
        harness.pair._arrivals = TokenBucket(3, 0.0)
        for _ in range(3):
            harness.pair.check_rate()
        with pytest.raises(TransportError, match="too many new streams"):
            harness.pair.check_rate()


class TestJoining:
    @pytest.mark.parametrize("order", [(NEAR, FAR), (FAR, NEAR)])
    def test_halves_join_in_any_order(self, order: tuple[Side, Side]) -> None:
        harness = PairHarness()
        one, _ = harness.add_half(order[0])
        assert one.is_joinable
        other, _ = harness.add_half(order[1])
        assert (one.partner, other.partner) == (other, one)

    def test_half_is_joined_only_once(self) -> None:
        harness = PairHarness()
        near, _ = harness.add_half(NEAR)
        far, _ = harness.add_half(FAR)
        second, _ = harness.add_half(FAR)
        assert far.connection.is_over
        assert near.connection.is_over
        assert second.is_joinable
        third, _ = harness.add_half(NEAR)
        assert third.partner is second

    def test_second_near_half_replaces_the_first(self) -> None:
        harness = PairHarness()
        first, _ = harness.add_half(NEAR)
        second, _ = harness.add_half(NEAR)
        assert harness.ended == [(first, REPLACED)]
        far, _ = harness.add_half(FAR)
        assert far.partner is second


class TestSeparation:
    @pytest.mark.parametrize("side", [NEAR, FAR])
    def test_both_halves_end_together(self, side: Side) -> None:
        harness = PairHarness()
        halves = {each: harness.add_half(each)[0] for each in (NEAR, FAR)}
        halves[side].connection.end("the cable")
        assert halves[side.other].connection.is_over
        assert {half.side for half, _ in harness.ended} == {NEAR, FAR}
        assert harness.ended[-1][1] == "the cable" or harness.ended[-1][1].endswith("the cable")

    def test_sent_frames_arrive_after_a_graceful_end(self) -> None:
        harness = PairHarness()
        near, sent = harness.add_half(NEAR)
        far, lane = harness.add_half(FAR)
        sent.read([make_heartbeat(), END], near.receive)
        assert near.connection.is_over
        assert not far.connection.is_over
        assert list(lane.yield_frames()) == [make_heartbeat(), END]

    def test_invalid_frame_ends_both_halves_with_its_reason(self) -> None:
        harness = PairHarness()
        near, sent = harness.add_half(NEAR)
        far, _ = harness.add_half(FAR)
        sent.read([b"x" * 200], near.receive)
        assert far.connection.is_over
        assert near.fault.startswith("NB-412 not a frame of this protocol")

    def test_pair_stays_known_for_a_while_after_joining(self) -> None:
        harness = PairHarness()
        near, _ = harness.add_half(NEAR)
        assert not harness.pair.is_known
        harness.add_half(FAR)
        assert harness.pair.is_known
        near.connection.end("it is over")
        assert harness.pair.is_known
        harness.now += 60.0
        assert not harness.pair.is_known


class TestCrossedAttempts:
    def start_attempt(self, **options: bool) -> tuple[PairHarness, Half, Half]:
        """A worker has connected, and its gateway is about to dial."""
        harness = PairHarness(**options)
        return harness, harness.add_half(NEAR)[0], harness.make_half(FAR, dialled=True)[0]

    def test_incoming_stream_is_refused_during_our_attempt(self) -> None:
        harness, near, half = self.start_attempt()
        with harness.pair.begin_attempt(half, near) as needed:
            assert needed
            for take in (harness.pair.yield_to_incoming, lambda: harness.add_half(FAR)):
                with pytest.raises(TransportError, match="both gateways opened a stream"):
                    take()
            assert harness.pair.use_dialled_half(half, near)
        assert near.partner is half

    def test_slow_attempt_yields_to_a_repeated_incoming_stream(self) -> None:
        """Otherwise attempts to an unreachable address, each of seconds, would leave no gap for the other gateway."""
        harness, near, half = self.start_attempt()
        with harness.pair.begin_attempt(half, near):
            harness.now += 1.5
            with pytest.raises(TransportError, match="both gateways opened a stream"):
                harness.pair.yield_to_incoming()
            harness.now += 1.5
            harness.pair.yield_to_incoming()
            assert half.connection.is_over
            theirs, _ = harness.add_half(FAR)
            assert not harness.pair.use_dialled_half(half, near)
        assert near.partner is theirs

    def test_yielding_side_accepts_the_incoming_stream(self) -> None:
        harness, near, half = self.start_attempt(yields=True)
        with harness.pair.begin_attempt(half, near):
            harness.pair.yield_to_incoming()
            assert half.connection.is_over
            theirs, _ = harness.add_half(FAR)
            assert not harness.pair.use_dialled_half(half, near)
        assert near.partner is theirs

    def test_repeated_incoming_stream_replaces_our_established_one(self) -> None:
        harness, near, half = self.start_attempt()
        harness.pair.use_dialled_half(half, near)
        with pytest.raises(TransportError, match="both gateways opened a stream"):
            harness.add_half(FAR)
        harness.now += 1.0
        theirs, _ = harness.add_half(FAR)
        assert half.connection.is_over
        assert harness.pair.find_half(FAR) is theirs

    def test_reader_of_an_unneeded_stream_is_released(self) -> None:
        harness = PairHarness(yields=True)
        half, _ = harness.make_half(FAR, dialled=True)
        frame = pack_header(Header(Kind.BEAT, Flag.LAST, conversation=1, source=1, destination=0), 0)
        reader = threading.Thread(target=half.receive, args=(frame,), daemon=True)
        reader.start()
        half.connection.end("it is not needed")
        reader.join(10.0)
        assert not reader.is_alive()


class GatewayPairSimulation:
    """Two gateways that dial each other, over a line with a clock of its own: `opening` seconds from the dial to the
    answer, `delay` seconds for anything from one to the other.
    """

    def __init__(self, opening_seconds: float, delay: float, draws: Random, *, unreachable: bool = False) -> None:
        self.opening_seconds, self.delay, self.draws, self.unreachable = opening_seconds, delay, draws, unreachable
        self.now, self.events, self.order = 0.0, [], itertools.count()
        self.pairs = {
            name: Pair(name, other, Inspection(), lambda *_: None, yields=name == GPU, now=lambda: self.now)
            for name, other in ((GPU, NPU), (NPU, GPU))
        }
        self.names = itertools.count()

    def schedule(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), act))

    def make_half(self, side: Side, name: str, *, dialled: bool = False) -> Half:
        half = Half(side, side.value, Connection(name), lambda frame: unpack_header(frame)[0], dialled=dialled)
        half.add_lane(0, Lane())
        return half

    def connect_worker(self, here: str) -> None:
        """Connect a worker to its gateway, which dials for it; the worker reconnects whenever this ends."""
        near = self.make_half(NEAR, f"{next(self.names):016x}")
        self.pairs[here].add_half(near)
        near.connection.on_end(lambda why: self.schedule(0.05, lambda: self.connect_worker(here)))
        self.schedule(0.3 if self.pairs[here].yields else 0.0, lambda: self.dial(here, near, 0))

    def dial(self, here: str, near: Half, attempt: int) -> None:
        """Dial as `Route._lead` does."""
        if not near.is_joinable:
            return
        pair, there = self.pairs[here], NPU if here == GPU else GPU
        mine = self.make_half(FAR, f"{next(self.names):016x}", dialled=True)
        theirs = self.make_half(FAR, mine.connection.name)
        opening = contextlib.ExitStack()
        opening.enter_context(pair.begin_attempt(mine, near))
        for one, other in ((mine, theirs), (theirs, mine)):
            one.connection.on_end(lambda why, other=other: self.schedule(self.delay, lambda: other.connection.end(why)))

        def settle() -> None:
            opening.close()
            if not mine.connection.is_over and not pair.use_dialled_half(mine, near):
                mine.connection.end("it is not needed")
            pause = Deadlines().draw_retry_pause(min(attempt, 4), self.draws.random())
            self.schedule(pause, lambda: self.dial(here, near, attempt + 1))

        if self.unreachable and here == NPU:
            self.schedule(10.0, lambda: (mine.connection.end("too long"), settle()))
        else:
            self.schedule(self.opening_seconds - self.delay, lambda: self.receive_stream(there, theirs))
            self.schedule(self.opening_seconds, settle)

    def receive_stream(self, here: str, half: Half) -> None:
        """Admit a stream as `Gateway._take` does."""
        pair = self.pairs[here]
        if half.connection.is_over:  # it was given up before it was sent
            return
        try:
            if pair.find_half(NEAR) is None and not pair.is_known:
                raise TransportError("it has not come yet")
            pair.yield_to_incoming()
            pair.add_half(half)
        except TransportError as error:
            half.connection.end(error.what)

    def are_joined(self) -> bool:
        nears, fars = ([pair.find_half(side) for pair in self.pairs.values()] for side in (NEAR, FAR))
        joined = [near is not None and near.partner is far for near, far in zip(nears, fars, strict=True)]
        return all(joined) and len({far.connection.name for far in fars if far is not None}) == 1

    def run(self, seconds: float) -> float | None:
        """Run for this long; returns the time since which they are joined, if they are."""
        since = None
        while self.events and self.events[0][0] < seconds:
            self.now, _, act = heapq.heappop(self.events)
            act()
            since = (self.now if since is None else since) if self.are_joined() else None
        return since


class TestMutualDialling:
    @pytest.mark.parametrize("ways", [2, 4, 8], ids=lambda ways: f"{ways // 2} round trips")
    @pytest.mark.parametrize("opening", [0.1, 0.9, 1.4, 4.8])
    def test_gateways_join_soon_for_any_opening_time(self, opening: float, ways: int) -> None:
        durations = []
        for seed in range(50):
            draws = Random(seed)
            simulation = GatewayPairSimulation(opening, opening / ways, draws)
            for here in (GPU, NPU):
                simulation.schedule(draws.random() * 1.5 * opening, partial(simulation.connect_worker, here))
            durations.append(simulation.run(60.0) or 60.0)
        assert max(durations) < 1.0 + 3 * opening

    @pytest.mark.parametrize("opening", [0.02, 0.4, 1.4])
    def test_unreachable_address_of_one_gateway_delays_joining_little(self, opening: float) -> None:
        durations = []
        for seed in range(50):
            simulation = GatewayPairSimulation(opening, opening / 2, Random(seed), unreachable=True)
            for here in (GPU, NPU):
                simulation.schedule(Random(seed).random(), partial(simulation.connect_worker, here))
            durations.append(simulation.run(60.0) or 60.0)
        assert max(durations) < 2.0 + 2 * opening


class TestSeveralLanes:
    def test_duplicate_lane_is_refused_and_not_stored(self) -> None:
        half, _ = PairHarness().make_half(NEAR)
        half.add_lane(1, Lane())
        for _ in range(3):
            with pytest.raises(TransportError, match="lane 1 was opened twice"):
                half.add_lane(1, Lane())
        assert len(half._lanes) == 2

    def test_lane_ended_gracefully_may_be_replaced(self) -> None:
        half, _ = PairHarness().make_half(NEAR)
        for _ in range(5):
            lane = Lane()
            half.add_lane(1, lane)
            lane.ended_gracefully = True
            lane.end("in order")
        assert not half.connection.is_over
        assert len(half._lanes) == 2

    def test_numbered_frames_wait_for_the_greeting(self) -> None:
        harness = PairHarness()
        near, _ = harness.add_half(NEAR)
        _, out = harness.add_half(FAR)
        further_lane = Lane()
        hear = near.add_lane(1, further_lane)
        reader = threading.Thread(target=further_lane.read, args=([make_heartbeat(2), END], hear), daemon=True)
        reader.start()
        for conversation in (0, 0):
            near.receive(make_heartbeat(conversation))
            assert next(out.yield_frames()) == make_heartbeat(0)
        reader.join(10.0)
        assert next(out.yield_frames()) == make_heartbeat(2)

    @pytest.mark.parametrize("side", [NEAR, FAR])
    def test_further_lane_is_not_read_before_the_greeting(self, side: Side) -> None:
        harness = PairHarness()
        halves = {each: harness.add_half(each) for each in (NEAR, FAR)}
        half, out, further_lane, read = halves[side][0], halves[side.other][1], Lane(), threading.Event()

        def incoming() -> Iterator[bytes]:
            read.set()
            yield END

        hear = half.add_lane(1, further_lane)
        reader = threading.Thread(target=further_lane.read, args=(incoming(), hear), daemon=True)
        reader.start()
        reader.join(0.05)
        assert not read.is_set()
        for _ in range(2):
            half.receive(make_heartbeat(0, source=side is FAR))
            next(out.yield_frames())
        reader.join(10.0)
        assert read.is_set() and further_lane.ended_gracefully

    def test_waiting_frames_are_released_when_the_connection_ends(self) -> None:
        harness = PairHarness()
        near, _ = harness.add_half(NEAR)
        further_lane = Lane()
        hear = near.add_lane(1, further_lane)
        reader = threading.Thread(target=further_lane.read, args=([make_heartbeat(2), END], hear), daemon=True)
        reader.start()
        near.connection.end("a test")
        reader.join(10.0)
        assert not reader.is_alive()


def test_unjoined_half_is_not_read() -> None:
    harness = PairHarness()
    far, lane = harness.add_half(FAR)
    events: list[str] = []

    def frames() -> Iterator[bytes]:
        events.append("read")
        yield from (make_heartbeat(0, source=1), END)

    reader = threading.Thread(target=lane.read, args=(frames(), far.receive), daemon=True)
    reader.start()
    wait_until(lambda: len(far._changed._waiters) == 1)  # type: ignore[attr-defined]
    events.append("joined")
    _, out = harness.add_half(NEAR)
    assert next(out.yield_frames()) == make_heartbeat(0, source=1)
    reader.join(10.0)
    assert events == ["joined", "read"]


def test_half_that_waits_for_its_partner_is_not_silent() -> None:
    harness = PairHarness()
    near, _ = harness.add_half(NEAR)
    assert near.measure_silence(float("inf")) == float("inf")
    reader = threading.Thread(target=near.receive, args=(make_heartbeat(),), daemon=True)
    reader.start()
    wait_until(lambda: near.measure_silence(float("inf")) == 0.0)
    near.connection.end("a test")
    reader.join(10.0)


ROSTER = ("gpu/0", "npu/0", "npu/1")


def make_frame(
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
        dtype=find_dtype_code("float32"),
        codec=codec,
        state=3 if codec else 0,
        dims=(size // 4 if rows is None else rows,),
    )
    return pack_header(header, 1234, sealed=sealed) + bytes(length)


@pytest.mark.parametrize("sealed", [False, True])
def test_frames_of_the_pair_pass_in_both_directions(sealed: bool) -> None:
    pair = Inspection.for_pair(ROSTER, "gpu/0", "npu/1")
    assert pair.check(make_frame(sealed=sealed), outward=True).conversation == 7
    assert pair.check(make_frame(2, 0, sealed=sealed), outward=False).source == 2


PAIR = Inspection.for_pair(ROSTER, "gpu/0", "npu/1")
WRONG_PAIR = "which is not the pair of this stream"
REFUSED_FRAMES: dict[str, tuple[Inspection, bytes, bool, str]] = {
    "to another worker": (PAIR, make_frame(0, 1), True, WRONG_PAIR),
    "of another worker": (PAIR, make_frame(1, 2), True, WRONG_PAIR),
    "of the other end": (PAIR, make_frame(2, 0), True, WRONG_PAIR),
    "of this end": (PAIR, make_frame(0, 2), False, WRONG_PAIR),
    "to itself": (Inspection(), make_frame(1, 1), True, "to itself"),
    "no bytes": (PAIR, b"", True, "is not a frame"),
    "too few for a header": (PAIR, b"x" * (HEADER_BYTES - 1), True, "is not a frame"),
    "too many": (PAIR, bytes(FRAME_CAP + 1), True, "is not a frame"),
    "a byte more than its header says": (PAIR, make_frame() + b"x", True, "bytes in a frame of"),
    "a byte less than its header says": (PAIR, make_frame()[:-1], True, "bytes in a frame of"),
}


@pytest.mark.parametrize(("inspection", "data", "outward", "words"), REFUSED_FRAMES.values(), ids=REFUSED_FRAMES)
def test_frame_of_another_pair_or_size_is_refused(
    inspection: Inspection, data: bytes, outward: bool, words: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        inspection.check(data, outward=outward)


def test_inspection_learns_unknown_workers_from_the_first_frame() -> None:
    pair = Inspection.for_pair(None, "gpu/0", "npu/1")
    pair.check(make_frame(0, 2), outward=True)
    pair.check(make_frame(2, 0), outward=False)
    with pytest.raises(RemoteProtocolError, match="which is not the pair"):
        pair.check(make_frame(0, 1), outward=True)


def test_inspection_does_not_check_payloads() -> None:
    """The worker detects the change by the seal or the checksum."""
    Inspection.for_pair(ROSTER, "gpu/0", "npu/1").check(make_frame()[:-1] + b"\1", outward=True)
