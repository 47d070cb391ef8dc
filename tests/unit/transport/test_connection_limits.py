"""Connections that open no stream do not keep others out."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.networks import wait_until
from tests.unit.transport.grpc_workers import RUN
from tests.unit.transport.link_pairs import GPU, NPU, TIMEOUT_SECONDS
from whale_nebula.errors import (
    IdentityError,
    TransportError,
)
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc import limits, options
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import ConnectionGuard, Endpoint, Limits, TokenBucket, find_surplus
from whale_nebula.transport.grpc.listener import (
    Dialler,
    FrameHandler,
    Listener,
    StreamRequest,
)

REQUEST = StreamRequest(RUN, NPU, GPU, "00112233aabbccdd", 2)


class IdleConnections:
    """A constant number of connections without a stream: each that is closed is opened again."""

    def __init__(self, address: str, count: int, *, source: str, greeting: bytes = b"") -> None:
        self.closed = 0
        self._greeting, self._source = greeting, source
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._is_stopping = threading.Event()
        self._open = [self._dial() for _ in range(count)]
        self._thread = threading.Thread(target=self._watch_connections)
        self._thread.start()

    def _dial(self) -> socket.socket:
        one = socket.create_connection(self._address, TIMEOUT_SECONDS, (self._source, 0))
        one.sendall(self._greeting)
        return one

    def _watch_connections(self) -> None:
        while not self._is_stopping.is_set():
            for each in select.select(self._open, [], [], 0.02)[0]:
                with contextlib.suppress(OSError):
                    if each.recv(1 << 12):
                        continue
                self.closed += 1
                each.close()
                self._open[self._open.index(each)] = self._dial()

    def __enter__(self) -> IdleConnections:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping.set()
        self._thread.join(TIMEOUT_SECONDS)
        for each in self._open:
            each.close()


def connect_with_retries(address: str, seconds: float = TIMEOUT_SECONDS) -> Lane:
    """Dial until a stream is accepted."""
    end = time.monotonic() + seconds
    while True:
        lane = Lane()
        try:
            dial(Target(address), REQUEST._replace(lane=0), lane, print, deadlines=Deadlines())
            return lane
        except TransportError:
            if time.monotonic() > end:
                raise


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class TestListenerUnderLoad:
    """Idle connections occupy all that gRPC allows; streams are accepted nevertheless, and stay open."""

    @pytest.fixture
    def listener(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
        monkeypatch.setattr(options, "HANDSHAKES", 48)
        one = Listener(
            "127.0.0.1:0",
            None,
            lambda request, dialler, lane: lambda frame: None,
            connections=2,
            limits=Limits(total=24, address=16),
        )
        one.start()
        yield one
        one.stop(0.0)

    @pytest.mark.parametrize(("greeting", "source"), [(b"", "127.0.0.1"), (HTTP2, "127.0.0.2")], ids=["silent", "idle"])
    def test_streams_are_accepted_among_idle_connections(
        self, listener: Listener, source: str, greeting: bytes
    ) -> None:
        earlier_lane = connect_with_retries(listener.address)
        with IdleConnections(listener.address, 60, source=source, greeting=greeting) as idle_connections:
            lanes = [connect_with_retries(listener.address) for _ in range(3)]
            wait_until(lambda: idle_connections.closed > 100)
            assert not any(lane.is_over for lane in (earlier_lane, *lanes))
        for lane in (earlier_lane, *lanes):
            lane.end("done")

    def test_connection_without_a_stream_is_closed(self, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options, "_IDLE_SECONDS", 0.3)
        listener.stop(0.0)
        listener.start()
        with IdleConnections(listener.address, 2, source="127.0.0.2", greeting=HTTP2) as idle_connections:
            wait_until(lambda: idle_connections.closed >= 4)

    def test_frequent_refusals_are_logged_a_few_times(self, caplog: pytest.LogCaptureFixture) -> None:
        refused = IdentityError("unknown identity")

        def accept(request: StreamRequest, dialler: Dialler, lane: Lane) -> FrameHandler:
            raise refused

        one = Listener("127.0.0.1:0", None, accept)
        one._refusals = TokenBucket(3, 0.0)
        one._is_stopping.set()  # as during a stop: answers are not delayed
        one.start()
        for _ in range(6):
            with pytest.raises(IdentityError, match="unknown identity"):
                dial(Target(one.address), REQUEST, Lane(), print, deadlines=Deadlines())
        one.stop(0.0)
        assert sum("unknown identity" in each for each in caplog.messages) == 3
        assert one._unlogged == 3


def test_guard_closes_the_oldest_connections_without_a_stream() -> None:
    """Accepted by this process, as by gRPC's server; the guard finds them among its files."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        guard = ConnectionGuard(port, Limits(total=10, address=2))
        clients = []
        for number in range(5):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS)))
            stack.enter_context(listener.accept()[0])
            if number == 0:
                guard.add_stream(f"ipv4:127.0.0.1:{clients[0].getsockname()[1]}")
            guard._close_surplus(float(number))
        is_closed = [bool(select.select([each], [], [], 0.0)[0]) for each in clients]
        assert is_closed == [False, True, True, False, False]
        assert clients[1].recv(1) == b"" and guard._close_surplus(5.0) == 2


class TestSurplus:
    """The choice of the connections that are closed if there are too many."""

    HOSTS = st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:1::1"])

    @given(st.dictionaries(st.builds(Endpoint, HOSTS, st.integers(1, 99)), st.floats(0, 50)))
    def test_surplus_leaves_limits_satisfied(self, idle: dict[Endpoint, float]) -> None:
        limits = Limits(total=10, address=4, seconds=30.0)
        surplus = find_surplus(idle, 50.0, limits)
        remaining = idle.keys() - set(surplus)
        fresh = {end for end in idle if idle[end] >= 20.0}

        def largest(ends: set[Endpoint]) -> int:
            sources = Counter(end.host.replace("8::2", "8::1") for end in ends)  # one host may own a /64
            return max(sources.values(), default=0)

        assert (
            len(surplus) == len(set(surplus))
            and len(remaining) <= 10
            and largest(remaining) <= 4
            and remaining <= fresh
        )
        if len(fresh) <= 10 and largest(fresh) <= 4:
            assert remaining == fresh

    def test_single_connection_survives_a_flood_from_another_address(self) -> None:
        good, flood = Endpoint("10.0.0.1", 1), {Endpoint("10.0.0.9", port): float(port) for port in range(1000)}
        assert good not in find_surplus({good: 0.0, **flood}, 10.0, Limits(total=8, address=8))

    def test_known_source_survives_a_flood_from_many_networks(self) -> None:
        known_ends = {Endpoint("192.0.2.1", port): port / 10 for port in range(40)}
        flood_ends = {Endpoint(f"10.{n // 250}.{n % 250}.7", 5): 5.0 + n / 1000 for n in range(1000)}  # a /24 each
        surplus = find_surplus({**known_ends, **flood_ends}, 10.0, Limits(), {"192.0.2.1/32"})
        assert known_ends.keys() - set(surplus) == set(sorted(known_ends, key=lambda end: -known_ends[end])[:24])
        assert len(surplus) == 1040 - 192

    @pytest.mark.parametrize(
        "flood",
        [
            [f"10.77.{n // 200}.{n % 200}" for n in range(1000)],
            [f"2001:db8:0:{n:x}::1" for n in range(1000)],
        ],
    )
    def test_other_network_survives_a_flood_from_one_network(self, flood: list[str]) -> None:
        good = {Endpoint("192.0.2.1", 1): 0.0, Endpoint("2001:db8:1::1", 1): 0.0}
        flood_ends = {Endpoint(host, 1): 1.0 + number / 1000 for number, host in enumerate(flood)}
        assert not set(find_surplus({**good, **flood_ends}, 10.0, Limits())) & set(good)

    def test_guard_remembers_a_limited_number_of_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "_SOURCES", 2)
        guard = ConnectionGuard(0, Limits())
        for host in ("10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.3"):
            guard.add_stream(f"ipv4:{host}:7")
            guard.remove_stream(f"ipv4:{host}:7")
        assert list(guard._sources) == ["10.0.0.1/32", "10.0.0.3/32"]
        assert not guard._streams
