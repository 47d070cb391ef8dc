"""Memory links: the protocol, and lines that behave like lines."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from tests.unit.transport.cable import FakeClock, back, key, memory_pair
from whale_nebula.errors import DeadlineError, LinkClosedError, LocalProtocolError, RemoteFailureError
from whale_nebula.transport.memory import MemoryLink, MemoryNetwork
from whale_nebula.transport.protocol import Key, Link, LinkTotals
from whale_nebula.wire.frame import HEADER_BYTES


@dataclass(frozen=True)
class Line:
    rate: float | None = None
    delay: float = 0.0


RATE = 8e6  # a million bytes a second
SIZE = 1_000_000 - HEADER_BYTES  # with its header it takes the line for one second exactly
TENSOR = np.zeros(SIZE, np.uint8)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def line(clock: FakeClock) -> tuple[MemoryLink, MemoryLink]:
    return memory_pair(MemoryNetwork({("gpu", "npu"): Line(RATE, 0.25)}, clock=clock))


def test_a_tensor_travels_by_reference() -> None:
    here, there = memory_pair(MemoryNetwork())
    link: Link = here
    array = np.arange(3)
    link.send(key(), array)
    assert there.receive(key(), 1.0) is array


def test_one_message_takes_its_bytes_over_the_rate_and_the_delay(line: tuple, clock: FakeClock) -> None:
    line[0].send(key(), TENSOR)
    line[1].receive(key(), 10.0)
    assert clock.now() == pytest.approx(1.25)


def test_messages_in_one_direction_queue_and_the_delay_overlaps(line: tuple, clock: FakeClock) -> None:
    here, there = line
    for slot in range(3):
        here.send(key(slot), TENSOR)
    arrivals = []
    for slot in range(3):
        there.receive(key(slot), 10.0)
        arrivals.append(clock.now())
    assert arrivals == pytest.approx([1.25, 2.25, 3.25])


def test_the_two_directions_do_not_disturb_each_other(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(key(), TENSOR)
    there.send(back(), TENSOR)
    there.receive(key(), 10.0)
    here.receive(back(), 10.0)
    assert clock.now() == pytest.approx(1.25)


def test_the_line_is_free_again_after_a_pause(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(key(0), TENSOR)
    clock.time = 5.0
    here.send(key(1), TENSOR)
    there.receive(key(1), 10.0)
    assert clock.now() == pytest.approx(6.25)


def test_all_workers_of_two_clusters_share_their_line(clock: FakeClock) -> None:
    network = MemoryNetwork({("npu", "gpu"): Line(RATE)}, clock=clock)
    for worker in ("0", "1"):
        network.link(f"gpu/{worker}", f"npu/{worker}", "gpu", "npu").send(
            key(0, 0, f"gpu/{worker}", f"npu/{worker}"), TENSOR
        )
    network.link("npu/1", "gpu/1", "npu", "gpu").receive(key(0, 0, "gpu/1", "npu/1"), 10.0)
    assert clock.now() == pytest.approx(2.0)


def test_other_clusters_and_workers_of_one_cluster_are_joined_for_free(clock: FakeClock) -> None:
    network = MemoryNetwork({("gpu", "npu"): Line(RATE, 1.0), ("gpu", "gpu"): Line(RATE, 1.0)}, clock=clock)
    for there, cluster in (("gpu/1", "gpu"), ("tpu/0", "tpu")):
        network.link("gpu/0", there, "gpu", cluster).send(key(0, 0, "gpu/0", there), TENSOR)
        network.link(there, "gpu/0", cluster, "gpu").receive(key(0, 0, "gpu/0", there), 10.0)
    assert clock.now() == 0.0


def test_a_delay_without_a_rate_only_delays(clock: FakeClock) -> None:
    here, there = memory_pair(MemoryNetwork({("gpu", "npu"): Line(None, 0.5)}, clock=clock))
    for slot in range(4):
        here.send(key(slot), TENSOR)
    for slot in range(4):
        there.receive(key(slot), 10.0)
    assert clock.now() == pytest.approx(0.5)


def test_it_is_told_when_each_tensor_holds_the_line(line: tuple, clock: FakeClock) -> None:
    told: list[tuple[Key, int, float, float]] = []
    line[0].on_sent = lambda *about: told.append(about)
    for slot in (0, 1):
        line[0].send(key(slot), TENSOR)
    line[0].post({"kind": "PING", "last": False})  # control messages are not told
    assert told == [(key(0), 1_000_000, 0.0, 1.0), (key(1), 1_000_000, 1.0, 2.0)]


def test_a_deadline_before_the_arrival_is_an_error(line: tuple, clock: FakeClock) -> None:
    line[0].send(key(), TENSOR)
    with pytest.raises(DeadlineError):
        line[1].receive(key(), 1.0)
    assert clock.now() == 1.0


def test_messages_are_copies_and_take_the_line(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(key(), TENSOR)
    message = {"kind": "PING", "last": True, "found": [1, 2]}
    here.post(message)
    message["found"].append(3)
    assert there.take("PING", 10.0) == {"kind": "PING", "last": True, "found": [1, 2]}
    assert clock.now() == pytest.approx(1.25, abs=0.001)
    assert clock.now() > 1.25


def test_a_failure_overtakes_what_waits_for_the_line(line: tuple, clock: FakeClock) -> None:
    here, there = line
    for slot in range(5):
        here.send(key(slot), TENSOR)
    here.fail({"what": "division by zero", "why": "because", "where": 3})
    with pytest.raises(RemoteFailureError, match="'gpu/0' failed: division by zero"):
        there.receive(key(4), 10.0)
    assert clock.now() == pytest.approx(0.25, abs=0.001)


def test_a_close_comes_after_what_was_sent(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(key(0), TENSOR)
    here.close()
    here.close()
    there.receive(key(0), 10.0)
    with pytest.raises(LinkClosedError, match="'gpu/0' has closed"):
        there.receive(key(1), 10.0)
    with pytest.raises(LinkClosedError, match="'gpu/0' has closed"):
        there.send(back(), TENSOR)
    for attempt in (lambda: here.send(key(1), TENSOR), lambda: here.receive(back(), 1.0)):
        with pytest.raises(LinkClosedError, match="has closed its link to 'npu/0'"):
            attempt()


def test_totals_count_tensors_headers_and_messages() -> None:
    here, there = memory_pair(MemoryNetwork())
    here.send(key(0), np.zeros(10, np.float16), raw_bytes=40)
    here.send(key(1), np.zeros((0, 5)))
    before = here.totals()
    assert before == LinkTotals(payload_bytes=20, bytes=20 + 2 * HEADER_BYTES, raw_bytes=40, frames=2)
    here.post({"kind": "PING", "last": True})
    assert here.totals() - before == LinkTotals(bytes=len('{"kind":"PING","last":true}') + HEADER_BYTES, frames=1)
    assert there.totals() == LinkTotals()


def test_an_object_may_travel_if_its_size_is_given() -> None:
    here, there = memory_pair(MemoryNetwork())
    thing = object()
    with pytest.raises(LocalProtocolError, match="does not say its size"):
        here.send(key(0), thing)
    here.send(key(0), thing, size=12)
    assert there.receive(key(0), 1.0) is thing
    assert here.totals().payload_bytes == 12


def test_what_a_real_link_refuses_is_refused_here_too() -> None:
    here, _ = memory_pair(MemoryNetwork())
    with pytest.raises(LocalProtocolError, match="object"):
        here.send(key(), np.array(["a", None]))
    with pytest.raises(LocalProtocolError, match="does not belong"):
        here.send(back(), TENSOR)
    with pytest.raises(LocalProtocolError, match="does not belong"):
        here.receive(key(), 1.0)
    with pytest.raises(LocalProtocolError, match="not posted"):
        here.post({"kind": "BYE"})
    here.send(key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="came twice"):
        here.send(key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="itself"):
        MemoryNetwork().link("gpu/0", "gpu/0", "gpu", "gpu")


def test_a_real_line_is_never_early_and_the_total_is_right() -> None:
    here, there = memory_pair(MemoryNetwork({("gpu", "npu"): Line(RATE, 0.01)}))
    array = np.zeros(5_000 - HEADER_BYTES, np.uint8)  # 5 ms
    start = time.monotonic()
    for slot in range(4):
        here.send(key(slot), array)
    for slot in range(4):
        there.receive(key(slot), 10.0)
        assert time.monotonic() - start >= 0.01 + 0.005 * (slot + 1) - 1e-4
