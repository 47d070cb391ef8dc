"""The parts of the gRPC transport one by one: what a stream says first, lanes, connections, options, the port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.unit.transport.crossing import GPU, NPU, RUN, SOON, free_address
from whale_nebula.errors import (
    ExpiredError,
    IdentityError,
    LinkClosedError,
    LocalProtocolError,
    NebulaError,
    RemoteProtocolError,
    TransportError,
)
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.connection import Connection
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.knock import Knock
from whale_nebula.transport.grpc.lane import END, Lane, reason
from whale_nebula.transport.grpc.listener import Hear, Listener, Visitor
from whale_nebula.transport.grpc.probing import probe

KNOCK = Knock(RUN, NPU, GPU, "00112233aabbccdd", 2)
BIG = b"x" * (1 << 20)


class TestKnock:
    def test_it_says_what_was_put_in(self) -> None:
        strange = KNOCK._replace(run="ein Lauf: 50 %")
        assert Knock.read(strange.metadata()) == strange
        assert all(value.isascii() for _, value in strange.metadata())

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("version", "2", "another version"),
            ("run", "", "without a proper run"),
            ("source", "x" * 201, "without a proper source"),
            ("destination", "a%0Ab", "without a proper destination"),
            ("connection", "0011", "connection number"),
            ("lane", "-1", "lane that cannot be"),
            ("lane", "99999999999999999999", "lane that cannot be"),
        ],
    )
    def test_anything_else_is_refused(self, key: str, value: str, words: str) -> None:
        said = {**dict(KNOCK.metadata()), f"nebula-{key}": value}
        with pytest.raises(RemoteProtocolError, match=words):
            Knock.read(said.items())

    def test_a_stream_that_says_nothing_is_refused(self) -> None:
        with pytest.raises(RemoteProtocolError, match="another version"):
            Knock.read([("user-agent", "curl"), ("nebula-run-bin", b"\x00")])


class TestLane:
    def test_frames_leave_in_order_and_the_end_comes_last(self) -> None:
        lane = Lane()

        def speak() -> None:
            for number in range(20):
                assert lane.send(bytes([number]))
            lane.finish()

        thread = threading.Thread(target=speak)
        thread.start()
        assert list(lane.outgoing()) == [*(bytes([number]) for number in range(20)), END]
        thread.join(SOON)
        assert not lane.send(b"late")

    def test_there_is_room_for_one_frame(self) -> None:
        lane = Lane()
        sent: list[int] = []

        def speak() -> None:
            for number in range(3):
                if not lane.send(b"frame"):
                    return
                sent.append(number)

        thread = threading.Thread(target=speak)
        thread.start()
        out = lane.outgoing()
        next(out)
        thread.join(0.05)
        assert thread.is_alive()
        assert len(sent) <= 2
        lane.end("enough")
        thread.join(SOON)
        assert list(out) == []
        assert lane.why == "enough"

    def test_the_first_reason_stays_and_is_told_once(self) -> None:
        lane = Lane()
        told: list[str] = []
        broken: list[str] = []
        lane.on_end = told.append
        lane.end("first")
        lane.attach(broken.append)  # too late: it is broken at once
        lane.end("second")
        assert (told, broken) == (["first"], ["first"])

    def test_it_is_broken_before_its_frames_end(self) -> None:
        """Frames that merely end look to the other side like an end in order."""
        lane, done = Lane(), list[str]()
        entered, goes_on = threading.Event(), threading.Event()

        def breaks(why: str) -> None:
            entered.set()
            goes_on.wait(SOON)
            done.append("broken")

        def pull() -> None:
            assert list(lane.outgoing()) == []
            done.append("ended")

        lane.attach(breaks)
        threads = [threading.Thread(target=pull), threading.Thread(target=lane.end, args=("enough",))]
        for thread in threads:
            thread.start()
        assert entered.wait(SOON)
        threads[0].join(0.05)
        assert threads[0].is_alive()
        goes_on.set()
        for thread in threads:
            thread.join(SOON)
        assert done == ["broken", "ended"]

    def test_what_a_hearer_raises_ends_the_stream(self) -> None:
        lane = Lane()
        assert lane.read([b"a"], lambda frame: [][0]) == "list index out of range"
        assert lane.over

    def test_a_stream_that_runs_out_says_so(self) -> None:
        heard: list[bytes] = []
        assert Lane().read([b"a", b"b"], heard.append) == "the stream has ended"
        assert heard == [b"a", b"b"]

    @pytest.mark.parametrize(("frames", "in_order"), [([b"a", END], True), ([b"a"], False), ([], False), ([END], True)])
    def test_only_one_whose_last_message_says_so_has_ended_in_order(self, frames: list[bytes], in_order: bool) -> None:
        lane = Lane()
        lane.read(frames, lambda frame: None)
        assert lane.in_order is in_order

    def test_reasons_are_one_line(self) -> None:
        assert reason(ValueError("one\ntwo")) == "one"
        assert reason(ValueError()) == "ValueError"


class TestConnection:
    def test_small_frames_keep_to_the_first_lane_and_large_ones_take_any(self) -> None:
        connection = Connection("c")
        first, second = connection.lane(0), connection.lane(1)
        assert connection.send(b"small")
        assert connection.send(BIG)
        assert next(first.outgoing()) == b"small"
        assert next(second.outgoing()) == BIG

    def test_it_breaks_as_a_whole(self) -> None:
        connection = Connection("c")
        first, second = connection.lane(0), connection.lane(1)
        told: list[str] = []
        connection.on_end(told.append)
        second.end("the second lane is cut")
        assert first.over
        assert connection.over
        connection.on_end(told.append)
        assert told == ["the second lane is cut"] * 2
        assert not connection.send(b"late")
        assert connection.lane(2).over

    def test_a_further_lane_that_ends_in_order_takes_nothing_with_it(self) -> None:
        connection = Connection("c")
        first, second = connection.lane(0), connection.lane(1)
        second.read([END], print)
        assert (second.over, connection.over) == (True, False)
        assert connection.send(BIG)
        assert next(first.outgoing()) == BIG
        first.read([END], print)
        assert connection.over

    def test_a_further_lane_that_merely_ends_breaks_it(self) -> None:
        """A process that is killed may look like that."""
        connection = Connection("c")
        connection.lane(0)
        further = connection.lane(1)
        further.read([], print)
        assert (further.in_order, connection.over) == (False, True)

    def test_a_lane_comes_once(self) -> None:
        connection = Connection("c")
        connection.lane(0)
        assert connection.lane(0).why == "lane 0 came twice"
        assert not connection.over

    def test_further_lanes_are_held_until_the_greeting_is_done(self) -> None:
        connection = Connection("c")
        heard: list[bytes] = []
        connection.adopted.set()
        connection.hearer(0, heard.append)(b"greeting")
        thread = threading.Thread(target=connection.hearer(1, heard.append), args=(b"tensor",))
        thread.start()
        thread.join(0.02)
        assert heard == [b"greeting"]
        connection.opened.set()
        thread.join(SOON)
        assert heard == [b"greeting", b"tensor"]


class TestOptions:
    def test_windows_are_left_to_the_bandwidth_probe(self) -> None:
        for chosen in (options.client(Deadlines()), options.server(Deadlines(), 4)):
            said = dict(chosen)
            assert said["grpc.http2.bdp_probe"] == 1
            assert not [name for name in said if "window" in name or "lookahead" in name]

    def test_silence_is_found_within_its_time(self) -> None:
        said = dict(options.client(Deadlines(silence=8.0)))
        assert int(said["grpc.keepalive_time_ms"]) + int(said["grpc.http2.ping_timeout_ms"]) < 8000
        assert int(dict(options.server(Deadlines(), 1))["grpc.http2.min_recv_ping_interval_without_data_ms"]) < 3000

    def test_a_slow_line_gets_more_time(self) -> None:
        slow = dict(options.client(Deadlines(), rate=100_000.0))
        assert int(slow["grpc.http2.ping_timeout_ms"]) > 60_000

    def test_a_name_to_be_proved_is_asked_for(self) -> None:
        assert ("grpc.ssl_target_name_override", "abc.nebula") in options.client(Deadlines(), name="abc.nebula")


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Echoes frames; refuses some."""
    refusals: dict[str, NebulaError] = {
        "late/0": TransportError("come again"),
        "dead/0": LinkClosedError("worker 'gpu/1' is gone"),
        "bad/0": IdentityError("nobody knows you", why="your name is bad"),
        "expired/0": ExpiredError("its certificate has expired"),
        "confused/0": LocalProtocolError("this side is wrong about itself"),
    }

    def accept(knock: Knock, visitor: Visitor, lane: Lane) -> Hear:
        if knock.source in refusals:
            raise refusals[knock.source]
        return lambda frame: lane.send(frame) and None

    one = Listener("127.0.0.1:0", None, accept, connections=2)
    one.start()
    yield one
    one.stop(0.0)


class TestListener:
    def test_frames_come_back_as_they_are(self, listener: Listener) -> None:
        heard: list[bytes] = []
        both = threading.Semaphore(0)

        def hear(frame: bytes) -> None:
            heard.append(frame)
            both.release()

        lane = Lane()
        assert dial(Target(listener.address), KNOCK, lane, hear, deadlines=Deadlines()) >= 1
        for frame in (b"small", BIG):
            lane.send(frame)
            assert both.acquire(timeout=SOON)
        assert heard == [b"small", BIG]
        lane.end("done")

    @pytest.mark.parametrize(
        ("source", "kind", "words"),
        [
            ("late/0", TransportError, "come again"),
            ("dead/0", LinkClosedError, "worker 'gpu/1' is gone"),
            ("bad/0", IdentityError, "nobody knows you: your name is bad"),
            ("expired/0", TransportError, "its certificate has expired"),
            ("confused/0", TransportError, "this side is wrong about itself"),
        ],
    )
    def test_a_refusal_says_why_and_whether_to_come_again(
        self, listener: Listener, source: str, kind: type[NebulaError], words: str
    ) -> None:
        with pytest.raises(kind) as caught:
            dial(
                Target(listener.address), KNOCK._replace(source=source), Lane(), print, deadlines=Deadlines()
            )
        assert type(caught.value) is kind
        assert words in str(caught.value)

    def test_a_stream_that_does_not_introduce_itself_is_refused(self, listener: Listener) -> None:
        with pytest.raises(IdentityError, match="connection number"):
            dial(Target(listener.address), KNOCK._replace(connection="?"), Lane(), print, deadlines=Deadlines())

    def test_nobody_there_is_a_reason_to_try_again(self) -> None:
        with pytest.raises(TransportError) as caught:
            dial(Target(free_address()), KNOCK, Lane(), print, deadlines=Deadlines())
        assert type(caught.value) is TransportError

    def test_strangers_that_say_nothing_are_bounded(self, listener: Listener) -> None:
        """Two connections are expected, and sixteen more may be open; the rest is turned away at once."""
        host, _, port = listener.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port)), timeout=SOON) for _ in range(40)]
        turned_away = 0
        for each in strangers:
            each.settimeout(0.3 if turned_away == 0 else 0.02)
            try:
                turned_away += each.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionResetError:
                turned_away += 1
        for each in strangers:
            each.close()
        assert 40 - turned_away <= options.HANDSHAKES + 2


def test_probing_tells_open_from_refused(listener: Listener) -> None:
    assert probe(listener.address, SOON).found == "open"
    assert probe(free_address(), SOON).found == "refused"
    assert probe("no-such-host.invalid:1", SOON).found == "unknown"
