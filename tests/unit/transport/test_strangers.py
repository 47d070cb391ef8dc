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

from tests.unit.gateway.town import until
from tests.unit.transport.cable import GPU, NPU, SOON
from tests.unit.transport.crossing import RUN
from whale_nebula.errors import (
    IdentityError,
    TransportError,
)
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc import limits, options
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import ConnectionGuard, End, Limits, TokenBucket, find_surplus
from whale_nebula.transport.grpc.listener import (
    Hear,
    Knock,
    Listener,
    Visitor,
)

KNOCK = Knock(RUN, NPU, GPU, "00112233aabbccdd", 2)


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

    @pytest.mark.parametrize(("greeting", "source"), [(b"", "127.0.0.1"), (HTTP2, "127.0.0.2")], ids=["silent", "idle"])
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
