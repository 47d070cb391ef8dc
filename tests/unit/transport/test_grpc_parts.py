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

from tests.unit.gateway.networks import wait_until
from tests.unit.transport.grpc_workers import RUN, Certificates, find_free_address
from tests.unit.transport.link_pairs import GPU, NPU, TIMEOUT_SECONDS
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
from whale_nebula.transport.grpc.limits import ConnectionGuard, Endpoint, Limits, TokenBucket
from whale_nebula.transport.grpc.listener import (
    CERTIFICATE,
    SIGNATURE,
    Dialler,
    FrameHandler,
    Listener,
    StreamRequest,
    _ThreadPerStream,
    check_proof,
    prove_identity,
)
from whale_nebula.transport.grpc.options import probe_address
from whale_nebula.wire.frame import Flag, Header, Kind, pack_header


class TestSystemErrors:
    """A failed system call does not end a thread that others need."""

    def test_connection_guard_survives_a_failed_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checks = threading.Semaphore(0)

        def fail() -> dict[tuple[int, int], Endpoint]:
            checks.release()
            raise OSError("Too many open files")

        guard = ConnectionGuard(1, Limits())
        monkeypatch.setattr(guard, "_find_accepted_connections", fail)
        guard.start()
        for _ in range(3):
            assert checks.acquire(timeout=TIMEOUT_SECONDS)
        guard.stop()

    def test_connection_guard_checks_an_unreadable_socket_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
                guard = ConnectionGuard(port, Limits())
                with monkeypatch.context() as patch:
                    patch.setattr("os.dup", _raise_too_many)
                    assert guard._find_accepted_connections() == {}
                ends = [*guard._find_accepted_connections().values()]
                assert Endpoint("127.0.0.1", client.getsockname()[1]) in ends

    def test_stream_without_a_thread_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _raise_no_thread)
            future = _ThreadPerStream().submit(int)
        assert isinstance(future.exception(), RuntimeError)


def _raise_too_many(file: int) -> int:
    raise OSError("Too many open files")


def _raise_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


REQUEST = StreamRequest(RUN, NPU, GPU, "00112233aabbccdd", 2)
BIG = b"x" * (1 << 20)


class TestKnock:
    def test_metadata_round_trip_preserves_fields(self) -> None:
        strange = REQUEST._replace(run="ein Lauf: 50 %")
        assert StreamRequest.from_metadata(strange.metadata()) == strange
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
    def test_invalid_metadata_is_refused(self, key: str, value: str, words: str) -> None:
        metadata = {**dict(REQUEST.metadata()), f"nebula-{key}": value}
        with pytest.raises(RemoteProtocolError, match=words):
            StreamRequest.from_metadata(metadata.items())

    def test_missing_metadata_is_refused(self) -> None:
        with pytest.raises(RemoteProtocolError, match="unsupported protocol version"):
            StreamRequest.from_metadata([("user-agent", "curl"), ("nebula-run-bin", b"\x00")])


class TestProof:
    """The dialled side proves its identity, for one request only."""

    @pytest.fixture
    def home(self, tmp_path: Path) -> Certificates:
        home = Certificates(tmp_path / "home")
        home.issue(GPU, NPU)
        return home

    def check(self, home: Certificates, answer: dict[str, bytes], request: StreamRequest = REQUEST) -> Peer:
        return check_proof(Prover(home.of(NPU)), request, answer, home.identity(GPU))

    def test_valid_proof_returns_the_certificate(self, home: Certificates) -> None:
        gpu = home.of(GPU)
        assert self.check(home, dict(prove_identity(Prover(gpu), REQUEST, gpu.identity))) == gpu.peer

    def test_invalid_proof_is_refused(self, home: Certificates) -> None:
        gpu, npu = home.of(GPU), home.of(NPU)
        right = dict(prove_identity(Prover(gpu), REQUEST, gpu.identity))
        for wrong, words in (
            ({}, "does not prove its identity"),
            ({CERTIFICATE: right[CERTIFICATE]}, "does not prove its identity"),
            ({**right, SIGNATURE: right[SIGNATURE][:-1]}, "signature of gpu/0 is invalid"),
            ({**right, CERTIFICATE: b"\xff"}, "not a valid certificate"),
            (dict(prove_identity(Prover(npu), REQUEST, gpu.identity)), "expected gpu/0"),
            (dict(prove_identity(Prover(npu), REQUEST, gpu.identity)) | {CERTIFICATE: gpu.cert_pem}, "is invalid"),
        ):
            with pytest.raises(IdentityError, match=words):
                self.check(home, wrong)

    @pytest.mark.parametrize("changed", [{"connection": "00112233aabbccde"}, {"lane": 1}, {"destination": "gpu/1"}])
    def test_proof_is_valid_for_one_request(self, home: Certificates, changed: dict[str, Any]) -> None:
        gpu = home.of(GPU)
        answer = dict(prove_identity(Prover(gpu), REQUEST, gpu.identity))
        with pytest.raises(IdentityError, match="signature of gpu/0 is invalid"):
            self.check(home, answer, REQUEST._replace(**changed))


class TestLane:
    def test_frames_are_sent_in_order_before_the_end(self) -> None:
        lane = Lane()

        def send_frames() -> None:
            for number in range(20):
                assert lane.send(bytes([number]))
            lane.finish()

        thread = threading.Thread(target=send_frames)
        thread.start()
        assert list(lane.yield_frames()) == [*(bytes([number]) for number in range(20)), END]
        thread.join(TIMEOUT_SECONDS)
        assert not lane.send(b"late")

    def test_lane_has_room_for_one_frame(self) -> None:
        lane = Lane()
        sent: list[int] = []

        def send_frames() -> None:
            for number in range(3):
                if not lane.send(b"frame"):
                    return
                sent.append(number)

        thread = threading.Thread(target=send_frames)
        thread.start()
        out = lane.yield_frames()
        next(out)
        thread.join(0.05)
        assert thread.is_alive()
        assert len(sent) <= 2
        lane.end("enough")
        thread.join(TIMEOUT_SECONDS)
        assert list(out) == []
        assert lane.reason == "enough"

    def test_first_end_reason_is_kept_and_reported_once(self) -> None:
        lane = Lane()
        reasons: list[str] = []
        broken: list[str] = []
        lane.on_end = reasons.append
        lane.end("first")
        lane.attach_stream(broken.append)  # after the end: it is aborted at once
        lane.end("second")
        assert (reasons, broken) == (["first"], ["first"])

    def test_stream_is_aborted_before_its_frames_end(self) -> None:
        """A plain end of the frames would look to the other side like a graceful end."""
        lane, done = Lane(), list[str]()
        entered, may_end = threading.Event(), threading.Event()

        def breaks(why: str) -> None:
            entered.set()
            may_end.wait(TIMEOUT_SECONDS)
            done.append("broken")

        def read_frames() -> None:
            assert list(lane.yield_frames()) == []
            done.append("ended")

        lane.attach_stream(breaks)
        threads = [threading.Thread(target=read_frames), threading.Thread(target=lane.end, args=("enough",))]
        for thread in threads:
            thread.start()
        assert entered.wait(TIMEOUT_SECONDS)
        threads[0].join(0.05)
        assert threads[0].is_alive()
        may_end.set()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        assert done == ["broken", "ended"]

    @pytest.mark.parametrize(
        ("frames", "ended_gracefully"), [([b"a", END], True), ([b"a"], False), ([], False), ([END], True)]
    )
    def test_lane_ends_gracefully_only_after_an_end_message(self, frames: list[bytes], ended_gracefully: bool) -> None:
        lane = Lane()
        lane.read(frames, lambda frame: None)
        assert lane.ended_gracefully is ended_gracefully

    def test_bare_frames_are_read_at_a_limited_rate(self) -> None:
        lane, received, three = Lane(), [], threading.Event()
        lane.room.bare = TokenBucket(3, 0.0)
        bare = pack_header(Header(Kind.BEAT, Flag.LAST, conversation=1, source=0, destination=1), 0)
        other = b"x" * len(bare)

        def receive(frame: bytes) -> None:
            received.append(frame)
            if received.count(bare) == 3:
                three.set()

        reader = threading.Thread(target=lane.read, args=([*[bare, other] * 3, *[bare] * 97], receive), daemon=True)
        reader.start()
        assert three.wait(TIMEOUT_SECONDS)
        reader.join(0.05)
        assert reader.is_alive()
        lane.end("a test")
        reader.join(TIMEOUT_SECONDS)
        assert not reader.is_alive()
        assert received[:6] == [bare, other] * 3 and len(received) <= 7


def add_lane(connection: Connection, number: int) -> Lane:
    lane = Lane(connection.room)
    connection.add(number, lane)
    return lane


class TestConnection:
    def test_small_frames_use_the_first_lane_and_large_ones_any(self) -> None:
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        assert connection.send(b"small")
        assert connection.send(BIG)
        assert next(first.yield_frames()) == b"small"
        assert next(second.yield_frames()) == BIG

    def test_end_of_one_lane_ends_the_connection(self) -> None:
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        reasons: list[str] = []
        connection.on_end(reasons.append)
        second.end("the second lane is cut")
        assert first.is_over
        assert connection.is_over
        connection.on_end(reasons.append)
        assert reasons == ["the second lane is cut"] * 2
        assert not connection.send(b"late")
        assert add_lane(connection, 2).is_over

    def test_graceful_end_of_a_further_lane_keeps_the_connection(self) -> None:
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        second.read([END], print)
        assert (second.is_over, connection.is_over) == (True, False)
        assert connection.send(BIG)
        assert next(first.yield_frames()) == BIG
        first.read([END], print)
        assert connection.is_over

    def test_lanes_of_a_finished_connection_end_gracefully(self) -> None:
        """Otherwise the other side treats them as broken, and drops the last unread messages of lane 0."""
        connection = Connection("c")
        first, second = add_lane(connection, 0), add_lane(connection, 1)
        connection.finish()
        third = add_lane(connection, 2)
        assert list(first.yield_frames()) == [END]
        first.mark_lost("the other side left")  # lane 0 has ended before gRPC requests the frames of the others
        assert connection.is_over and [list(lane.yield_frames()) for lane in (second, third)] == [[END]] * 2

    def test_refused_lane_does_not_end_the_connection(self) -> None:
        """If it were accepted first, its end would end the connection."""
        carrier = AwaitingCarrier("gpu/0", "npu/0", "", deadlines=Deadlines())
        carrier._receiver = Mock()
        first, second = (StreamRequest("run", "npu/0", "gpu/0", "c", number) for number in (0, 1))
        carrier.accept_stream(first, lane := Lane())
        carrier.accept_stream(second, Lane())
        with pytest.raises(TransportError, match="no longer exists"):
            carrier.accept_stream(second, Lane())
        assert not lane.is_over

    def test_abrupt_end_of_a_further_lane_ends_the_connection(self) -> None:
        """As after a killed process."""
        connection = Connection("c")
        add_lane(connection, 0)
        further_lane = add_lane(connection, 1)
        further_lane.read([], print)
        assert (further_lane.ended_gracefully, connection.is_over) == (False, True)

    def test_duplicate_lane_is_refused(self) -> None:
        connection = Connection("c")
        add_lane(connection, 0)
        assert add_lane(connection, 0).reason == "lane 0 was opened twice"
        assert not connection.is_over

    def test_further_lanes_are_held_until_the_greeting_is_complete(self) -> None:
        connection = Connection("c")
        received: list[bytes] = []
        further_lane = add_lane(connection, 1)
        connection.hold_reading(1, further_lane)
        connection.adopted.set()
        thread = threading.Thread(target=further_lane.read, args=([b"tensor", END], received.append))
        thread.start()
        thread.join(0.02)
        assert not received
        connection.opened.set()
        thread.join(TIMEOUT_SECONDS)
        assert received == [b"tensor"]


class TestOptions:
    def test_window_sizes_are_left_to_the_bandwidth_probe(self) -> None:
        for channel_options in (options.make_client_options(Deadlines()), options.make_server_options(Deadlines(), 4)):
            chosen_options = dict(channel_options)
            assert chosen_options["grpc.http2.bdp_probe"] == 1
            assert not [name for name in chosen_options if "window" in name or "lookahead" in name]

    def test_keepalive_detects_silence_in_time(self) -> None:
        chosen_options = dict(options.make_client_options(Deadlines(silence=8.0)))
        assert int(chosen_options["grpc.keepalive_time_ms"]) + int(chosen_options["grpc.http2.ping_timeout_ms"]) < 8000
        assert (
            int(dict(options.make_server_options(Deadlines(), 1))["grpc.http2.min_recv_ping_interval_without_data_ms"])
            < 3000
        )


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Echoes frames; refuses some sources."""
    refusals: dict[str, NebulaError] = {
        "late/0": TransportError("try again"),
        "dead/0": LinkClosedError("worker 'gpu/1' is gone"),
        "bad/0": IdentityError("unknown identity", why="invalid name"),
        "expired/0": ExpiredError("its certificate has expired"),
        "confused/0": LocalProtocolError("this side has an internal error"),
    }

    def accept(request: StreamRequest, dialler: Dialler, lane: Lane) -> FrameHandler:
        if request.source in refusals:
            raise refusals[request.source]
        return lambda frame: lane.send(frame) and None

    one = Listener("127.0.0.1:0", None, accept, connections=2)
    one.start()
    yield one
    one.stop(0.0)


class TestListener:
    def test_echoed_frames_are_unchanged(self, listener: Listener) -> None:
        received: list[bytes] = []
        both = threading.Semaphore(0)

        def receive(frame: bytes) -> None:
            received.append(frame)
            both.release()

        lane = Lane()
        assert dial(Target(listener.address), REQUEST, lane, receive, deadlines=Deadlines()) >= 1
        for frame in (b"small", BIG):
            lane.send(frame)
            assert both.acquire(timeout=TIMEOUT_SECONDS)
        assert received == [b"small", BIG]
        lane.end("done")

    @pytest.mark.parametrize(
        ("source", "kind", "words"),
        [
            ("late/0", TransportError, "try again"),
            ("dead/0", LinkClosedError, "worker 'gpu/1' is gone"),
            ("bad/0", IdentityError, "unknown identity: invalid name"),
            ("expired/0", TransportError, "its certificate has expired"),
            ("confused/0", TransportError, "this side has an internal error"),
        ],
    )
    def test_refusal_error_has_reason_and_kind(
        self, listener: Listener, source: str, kind: type[NebulaError], words: str
    ) -> None:
        with pytest.raises(kind) as caught:
            dial(Target(listener.address), REQUEST._replace(source=source), Lane(), print, deadlines=Deadlines())
        assert type(caught.value) is kind
        assert words in str(caught.value)

    def test_stream_with_invalid_metadata_is_refused(self, listener: Listener) -> None:
        with pytest.raises(IdentityError, match="connection number"):
            dial(Target(listener.address), REQUEST._replace(connection="?"), Lane(), print, deadlines=Deadlines())


class SilentService(grpc.GenericRpcHandler):
    """A foreign service: it accepts every call, and neither answers as a worker does nor ends."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def service(self, details: Any) -> Any:
        def talk(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
            context.send_initial_metadata(())
            yield b"hello"
            self.over.wait(TIMEOUT_SECONDS)

        return grpc.stream_stream_rpc_method_handler(talk)


def test_foreign_service_is_refused_without_leaving_a_thread() -> None:
    server, service = grpc.server(ThreadPoolExecutor(2)), SilentService()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        lane = Lane()
        Connection("0" * 16).hold_reading(0, lane)  # it waits for a link that is never notified
        with pytest.raises(IdentityError, match="is not a worker"):
            dial(Target(f"127.0.0.1:{port}"), REQUEST, lane, print, deadlines=Deadlines(connect=0.2))
        assert lane.is_over
        wait_until(lambda: not [each for each in threading.enumerate() if each.name == "nebula-receive"])
    finally:
        service.over.set()
        server.stop(0.0)


def test_probe_distinguishes_open_refused_and_unknown(listener: Listener) -> None:
    assert probe_address(listener.address, TIMEOUT_SECONDS).outcome == "open"
    assert probe_address(find_free_address(), TIMEOUT_SECONDS).outcome == "refused"
    assert probe_address("no-such-host.invalid:1", TIMEOUT_SECONDS).outcome == "unknown"
