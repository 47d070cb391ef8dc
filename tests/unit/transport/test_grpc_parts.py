"""The parts of the gRPC transport: the first message of a stream, lanes, connections, options, the port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from tests.unit.gateway.town import until
from tests.unit.transport.cable import GPU, NPU, SOON
from tests.unit.transport.crossing import RUN, Certificates, free_address
from whale_nebula.errors import (
    ExpiredError,
    IdentityError,
    LinkClosedError,
    LocalProtocolError,
    NebulaError,
    RemoteProtocolError,
    TransportError,
)
from whale_nebula.security import Peer, Prover
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.carrier import AwaitingCarrier
from whale_nebula.transport.grpc.connection import END, Connection, Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import ConnectionGuard, End, Limits, TokenBucket
from whale_nebula.transport.grpc.listener import (
    CERTIFICATE,
    SIGNATURE,
    Hear,
    Knock,
    Listener,
    Visitor,
    _Threads,
    check_proof,
    prove_identity,
)
from whale_nebula.transport.grpc.options import probe
from whale_nebula.wire.frame import Flag, Header, Kind, pack


class TestWhenTheSystemRefuses:
    """One call that fails must not end a thread that everybody needs."""

    def test_the_guard_looks_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = threading.Semaphore(0)

        def fail() -> list[tuple[int, End]]:
            looks.release()
            raise OSError("Too many open files")

        guard = ConnectionGuard(1, Limits())
        monkeypatch.setattr(guard, "_accepted_connections", fail)
        guard.start()
        for _ in range(3):
            assert looks.acquire(timeout=SOON)
        guard.stop()

    def test_a_socket_that_could_not_be_looked_at_is_not_taken_for_somebody_elses(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
                guard = ConnectionGuard(port, Limits())
                with monkeypatch.context() as patched:
                    patched.setattr("os.dup", _raise_too_many)
                    assert list(guard._accepted_connections()) == []
                ends = [end for _, end in guard._accepted_connections()]
                assert End("127.0.0.1", client.getsockname()[1]) in ends

    def test_a_stream_without_a_thread_fails_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _raise_no_thread)
            future = _Threads().submit(int)
        assert isinstance(future.exception(), RuntimeError)


def _raise_too_many(file: int) -> int:
    raise OSError("Too many open files")


def _raise_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


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
            ("version", "2", "unsupported protocol version"),
            ("run", "", "without a valid run"),
            ("source", "x" * 201, "without a valid source"),
            ("destination", "a%0Ab", "without a valid destination"),
            ("connection", "0011", "connection number"),
            ("lane", "-1", "invalid lane"),
            ("lane", "99999999999999999999", "invalid lane"),
        ],
    )
    def test_anything_else_is_refused(self, key: str, value: str, words: str) -> None:
        said = {**dict(KNOCK.metadata()), f"nebula-{key}": value}
        with pytest.raises(RemoteProtocolError, match=words):
            Knock.read(said.items())

    def test_a_stream_that_says_nothing_is_refused(self) -> None:
        with pytest.raises(RemoteProtocolError, match="unsupported protocol version"):
            Knock.read([("user-agent", "curl"), ("nebula-run-bin", b"\x00")])


class TestProof:
    """The side that was dialled proves who it is, for this knock alone."""

    @pytest.fixture
    def home(self, tmp_path: Path) -> Certificates:
        home = Certificates(tmp_path / "home")
        home.issue(GPU, NPU)
        return home

    def check(self, home: Certificates, answer: dict[str, bytes], knock: Knock = KNOCK) -> Peer:
        return check_proof(Prover(home.of(NPU)), knock, answer, home.identity(GPU))

    def test_a_right_one_gives_the_certificate(self, home: Certificates) -> None:
        gpu = home.of(GPU)
        assert self.check(home, dict(prove_identity(Prover(gpu), KNOCK, gpu.identity))) == gpu.peer

    def test_a_wrong_one_is_refused(self, home: Certificates) -> None:
        gpu, npu = home.of(GPU), home.of(NPU)
        right = dict(prove_identity(Prover(gpu), KNOCK, gpu.identity))
        for wrong, words in (
            ({}, "does not prove its identity"),
            ({CERTIFICATE: right[CERTIFICATE]}, "does not prove its identity"),
            ({**right, SIGNATURE: right[SIGNATURE][:-1]}, "signature of gpu/0 is invalid"),
            ({**right, CERTIFICATE: b"\xff"}, "not a valid certificate"),
            (dict(prove_identity(Prover(npu), KNOCK, gpu.identity)), "expected gpu/0"),
            (dict(prove_identity(Prover(npu), KNOCK, gpu.identity)) | {CERTIFICATE: gpu.cert_pem}, "is invalid"),
        ):
            with pytest.raises(IdentityError, match=words):
                self.check(home, wrong)

    @pytest.mark.parametrize("changed", [{"connection": "00112233aabbccde"}, {"lane": 1}, {"destination": "gpu/1"}])
    def test_it_is_good_for_one_knock(self, home: Certificates, changed: dict[str, Any]) -> None:
        gpu = home.of(GPU)
        answer = dict(prove_identity(Prover(gpu), KNOCK, gpu.identity))
        with pytest.raises(IdentityError, match="signature of gpu/0 is invalid"):
            self.check(home, answer, KNOCK._replace(**changed))


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

    @pytest.mark.parametrize(("frames", "in_order"), [([b"a", END], True), ([b"a"], False), ([], False), ([END], True)])
    def test_only_one_whose_last_message_says_so_has_ended_in_order(self, frames: list[bytes], in_order: bool) -> None:
        lane = Lane()
        lane.read(frames, lambda frame: None)
        assert lane.in_order is in_order

    def test_frames_without_content_are_read_at_a_rate(self) -> None:
        lane, heard, three = Lane(), [], threading.Event()
        lane.room.bare = TokenBucket(3, 0.0)
        bare = pack(Header(Kind.BEAT, Flag.LAST, conversation=1, source=0, destination=1), 0)
        other = b"x" * len(bare)

        def hear(frame: bytes) -> None:
            heard.append(frame)
            if heard.count(bare) == 3:
                three.set()

        reader = threading.Thread(target=lane.read, args=([*[bare, other] * 3, *[bare] * 97], hear), daemon=True)
        reader.start()
        assert three.wait(SOON)
        reader.join(0.05)
        assert reader.is_alive()
        lane.end("a test")
        reader.join(SOON)
        assert not reader.is_alive()
        assert heard[:6] == [bare, other] * 3 and len(heard) <= 7


def add_lane(connection: Connection, number: int) -> Lane:
    lane = Lane(connection.room)
    connection.add(number, lane)
    return lane


class TestConnection:
    def test_small_frames_keep_to_the_first_lane_and_large_ones_take_any(self) -> None:
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        assert connection.send(b"small")
        assert connection.send(BIG)
        assert next(first.outgoing()) == b"small"
        assert next(second.outgoing()) == BIG

    def test_it_breaks_as_a_whole(self) -> None:
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        told: list[str] = []
        connection.on_end(told.append)
        second.end("the second lane is cut")
        assert first.over
        assert connection.over
        connection.on_end(told.append)
        assert told == ["the second lane is cut"] * 2
        assert not connection.send(b"late")
        assert add_lane(connection, 2).over

    def test_a_further_lane_that_ends_in_order_takes_nothing_with_it(self) -> None:
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        second.read([END], print)
        assert (second.over, connection.over) == (True, False)
        assert connection.send(BIG)
        assert next(first.outgoing()) == BIG
        first.read([END], print)
        assert connection.over

    def test_lanes_that_have_finished_say_so_however_late_they_are_taken_in_or_asked(self) -> None:
        """Else the other side takes them for broken, and drops what was said last on lane 0 and is not heard yet."""
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        connection.finish()
        third = add_lane(connection, 2)
        assert list(first.outgoing()) == [END]
        first.lose("the other side left")  # lane 0 is gone in order before gRPC has asked for the others' frames
        assert connection.over and [list(lane.outgoing()) for lane in (second, third)] == [[END]] * 2

    def test_a_lane_that_its_connection_does_not_take_is_refused_before_it_is_open(self) -> None:
        """One that was let in first would be broken, and its connection with it."""
        carrier = AwaitingCarrier("gpu/0", "npu/0", "", deadlines=Deadlines())
        carrier._receiver = Mock()
        first, second = (Knock("run", "npu/0", "gpu/0", "c", number) for number in (0, 1))
        carrier.take(first, lane := Lane())
        carrier.take(second, Lane())
        with pytest.raises(TransportError, match="no longer exists"):
            carrier.take(second, Lane())
        assert not lane.over

    def test_a_further_lane_that_merely_ends_breaks_it(self) -> None:
        """A process that is killed may look like that."""
        connection = Connection("c")
        add_lane(connection, 0)
        further = add_lane(connection, 1)
        further.read([], print)
        assert (further.in_order, connection.over) == (False, True)

    def test_a_lane_comes_once(self) -> None:
        connection = Connection("c")
        add_lane(connection, 0)
        assert add_lane(connection, 0).why == "lane 0 was opened twice"
        assert not connection.over

    def test_further_lanes_are_held_until_the_greeting_is_done(self) -> None:
        connection = Connection("c")
        heard: list[bytes] = []
        further = add_lane(connection, 1)
        connection.hold(1, further)
        connection.adopted.set()
        thread = threading.Thread(target=further.read, args=([b"tensor", END], heard.append))
        thread.start()
        thread.join(0.02)
        assert not heard
        connection.opened.set()
        thread.join(SOON)
        assert heard == [b"tensor"]


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
            dial(Target(listener.address), KNOCK._replace(source=source), Lane(), print, deadlines=Deadlines())
        assert type(caught.value) is kind
        assert words in str(caught.value)

    def test_a_stream_that_does_not_introduce_itself_is_refused(self, listener: Listener) -> None:
        with pytest.raises(IdentityError, match="connection number"):
            dial(Target(listener.address), KNOCK._replace(connection="?"), Lane(), print, deadlines=Deadlines())


class Silent(grpc.GenericRpcHandler):
    """A service that is none of ours: it takes every call, answers nothing that a worker would, and goes on."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def service(self, details: Any) -> Any:
        def talk(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
            context.send_initial_metadata(())
            yield b"hello"
            self.over.wait(SOON)

        return grpc.stream_stream_rpc_method_handler(talk)


def test_what_answers_and_is_no_worker_holds_no_thread() -> None:
    server, silent = grpc.server(ThreadPoolExecutor(2)), Silent()
    server.add_generic_rpc_handlers((silent,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        lane = Lane()
        Connection("0" * 16).hold(0, lane)  # it waits for a link that never hears of it
        with pytest.raises(IdentityError, match="is not a worker"):
            dial(Target(f"127.0.0.1:{port}"), KNOCK, lane, print, deadlines=Deadlines(connect=0.2))
        assert lane.over
        until(lambda: not [each for each in threading.enumerate() if each.name == "nebula-receive"])
    finally:
        silent.over.set()
        server.stop(0.0)


def test_probing_tells_open_from_refused(listener: Listener) -> None:
    assert probe(listener.address, SOON).found == "open"
    assert probe(free_address(), SOON).found == "refused"
    assert probe("no-such-host.invalid:1", SOON).found == "unknown"
