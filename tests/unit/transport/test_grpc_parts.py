"""The parts of the gRPC transport one by one: what a stream says first, lanes, connections, options, the port."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from whale_nebula.transport.grpc import limits, options
from whale_nebula.transport.grpc.connection import END, Connection, Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import ConnectionGuard, End, Limits, TokenBucket, find_surplus
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
            ({}, "does not prove who it is"),
            ({CERTIFICATE: right[CERTIFICATE]}, "does not prove who it is"),
            ({**right, SIGNATURE: right[SIGNATURE][:-1]}, "signature of gpu/0 is wrong"),
            ({**right, CERTIFICATE: b"\xff"}, "no certificate"),
            (dict(prove_identity(Prover(npu), KNOCK, gpu.identity)), "expected gpu/0"),
            (dict(prove_identity(Prover(npu), KNOCK, gpu.identity)) | {CERTIFICATE: gpu.cert_pem}, "is wrong"),
        ):
            with pytest.raises(IdentityError, match=words):
                self.check(home, wrong)

    @pytest.mark.parametrize("changed", [{"connection": "00112233aabbccde"}, {"lane": 1}, {"destination": "gpu/1"}])
    def test_it_is_good_for_one_knock(self, home: Certificates, changed: dict[str, Any]) -> None:
        gpu = home.of(GPU)
        answer = dict(prove_identity(Prover(gpu), KNOCK, gpu.identity))
        with pytest.raises(IdentityError, match="signature of gpu/0 is wrong"):
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
        bare = pack(Header(Kind.BEAT, Flag.LAST, epoch=1, source=0, destination=1), 0)
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
        connection, lane = Connection("0" * 16), Lane()
        hear = connection.hearer(0, lambda frame: None)  # which waits for a link that never hears of it
        with pytest.raises(IdentityError, match="is no worker of ours"):
            dial(Target(f"127.0.0.1:{port}"), KNOCK, lane, hear, deadlines=Deadlines(connect=0.2))
        assert lane.over
        until(lambda: not [each for each in threading.enumerate() if each.name == "nebula-hear"])
    finally:
        silent.over.set()
        server.stop(0.0)


class Strangers:
    """Connections that ask for no stream, as many as there may be: each that is closed is opened again."""

    def __init__(self, address: str, count: int, *, source: str, greeting: bytes = b"") -> None:
        self.closed = 0
        self._greeting, self._source = greeting, source
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._over = threading.Event()
        self._open = [self._dial() for _ in range(count)]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _dial(self) -> socket.socket:
        one = socket.create_connection(self._address, SOON, (self._source, 0))
        one.sendall(self._greeting)
        return one

    def _run(self) -> None:
        while not self._over.is_set():
            for each in select.select(self._open, [], [], 0.02)[0]:
                with contextlib.suppress(OSError):
                    if each.recv(1 << 12):
                        continue
                self.closed += 1
                each.close()
                self._open[self._open.index(each)] = self._dial()

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(SOON)
        for each in self._open:
            each.close()


def connect(address: str, seconds: float = SOON) -> Lane:
    """A stream that is let in, of one who dials until it is."""
    end = time.monotonic() + seconds
    while True:
        lane = Lane()
        try:
            dial(Target(address), KNOCK._replace(lane=0), lane, print, deadlines=Deadlines())
            return lane
        except TransportError:
            if time.monotonic() > end:
                raise


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class TestStrangersAtAListener:
    """They take all connections that gRPC allows; whoever asks for a stream comes in nevertheless, and stays."""

    @pytest.fixture
    def listener(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
        monkeypatch.setattr(options, "HANDSHAKES", 48)
        one = Listener(
            "127.0.0.1:0",
            None,
            lambda knock, visitor, lane: lambda frame: None,
            connections=2,
            limits=Limits(total=24, address=16),
        )
        one.start()
        yield one
        one.stop(0.0)

    @pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
    @pytest.mark.parametrize("greeting", [b"", HTTP2], ids=["silent", "idle"])
    def test_whoever_asks_for_a_stream_comes_in(self, listener: Listener, source: str, greeting: bytes) -> None:
        before = connect(listener.address)
        with Strangers(listener.address, 60, source=source, greeting=greeting) as strangers:
            lanes = [connect(listener.address) for _ in range(3)]
            until(lambda: strangers.closed > 100)
            assert not any(lane.over for lane in (before, *lanes))
        for lane in (before, *lanes):
            lane.end("done")

    def test_nobody_holds_a_connection_for_long_without_a_stream(
        self, listener: Listener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "_IDLE_SECONDS", 0.3)
        listener.stop(0.0)
        listener.start()
        with Strangers(listener.address, 2, source="127.0.0.2", greeting=HTTP2) as strangers:
            until(lambda: strangers.closed >= 4)

    def test_refusals_in_numbers_are_answered_late_and_logged_a_few_times(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        refused = IdentityError("nobody knows you")

        def accept(knock: Knock, visitor: Visitor, lane: Lane) -> Hear:
            raise refused

        one = Listener("127.0.0.1:0", None, accept)
        one._refusals = TokenBucket(3, 0.0)
        one._over.set()  # as if it were about to stop: answers do not wait
        one.start()
        for _ in range(6):
            with pytest.raises(IdentityError, match="nobody knows you"):
                dial(Target(one.address), KNOCK, Lane(), print, deadlines=Deadlines())
        one.stop(0.0)
        assert sum("nobody knows you" in each for each in caplog.messages) == 3
        assert one._unlogged == 3


class TestSurplus:
    """Which connections are closed, where there are too many."""

    HOSTS = st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:1::1"])

    @given(st.dictionaries(st.builds(End, HOSTS, st.integers(1, 99)), st.floats(0, 50)))
    def test_as_many_as_are_too_much_and_the_oldest_of_the_largest_crowd(self, idle: dict[End, float]) -> None:
        limits = Limits(total=10, address=4, seconds=30.0)
        surplus = find_surplus(idle, 50.0, limits)
        kept = idle.keys() - set(surplus)
        fresh = {end for end in idle if idle[end] >= 20.0}

        def largest(ends: set[End]) -> int:
            sources = Counter(end.host.replace("8::2", "8::1") for end in ends)  # one host has 64 bits for itself
            return max(sources.values(), default=0)

        assert len(surplus) == len(set(surplus)) and len(kept) <= 10 and largest(kept) <= 4 and kept <= fresh
        if len(fresh) <= 10 and largest(fresh) <= 4:
            assert kept == fresh

    def test_one_alone_at_its_address_keeps_his_in_a_flood_from_another(self) -> None:
        good, flood = End("10.0.0.1", 1), {End("10.0.0.9", port): float(port) for port in range(1000)}
        assert good not in find_surplus({good: 0.0, **flood}, 10.0, Limits(total=8, address=8))

    def test_who_was_let_in_before_keeps_his_in_a_flood_from_everywhere(self) -> None:
        mine = {End("192.0.2.1", port): port / 10 for port in range(40)}
        many = {End(f"10.{n // 250}.{n % 250}.7", 5): 5.0 + n / 1000 for n in range(1000)}  # a /24 each
        surplus = find_surplus({**mine, **many}, 10.0, Limits(), {"192.0.2.1/32"})
        assert mine.keys() - set(surplus) == set(sorted(mine, key=lambda end: -mine[end])[:24])
        assert len(surplus) == 1040 - 192

    @pytest.mark.parametrize(
        "flood",
        [
            [f"10.77.{n // 200}.{n % 200}" for n in range(1000)],
            [f"2001:db8:0:{n:x}::1" for n in range(1000)],
        ],
    )
    def test_one_of_another_network_keeps_his_in_a_flood_from_many_addresses(self, flood: list[str]) -> None:
        good = {End("192.0.2.1", 1): 0.0, End("2001:db8:1::1", 1): 0.0}
        crowd = {End(host, 1): 1.0 + number / 1000 for number, host in enumerate(flood)}
        assert not set(find_surplus({**good, **crowd}, 10.0, Limits())) & set(good)

    def test_a_guard_remembers_so_many_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "_SOURCES", 2)
        guard = ConnectionGuard(0, Limits())
        for host in ("10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.3"):
            guard.add_stream(f"ipv4:{host}:7")
            guard.remove_stream(f"ipv4:{host}:7")
        assert list(guard._sources) == ["10.0.0.1/32", "10.0.0.3/32"]
        assert not guard._streams


def test_probing_tells_open_from_refused(listener: Listener) -> None:
    assert probe(listener.address, SOON).found == "open"
    assert probe(free_address(), SOON).found == "refused"
    assert probe("no-such-host.invalid:1", SOON).found == "unknown"
