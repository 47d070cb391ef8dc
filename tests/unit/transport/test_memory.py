"""Memory links: the protocol, and emulated lines."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.unit.transport.cable import FakeClock, back, key, memory_pair
from whale_nebula.errors import LinkClosedError, LocalProtocolError, RemoteFailureError
from whale_nebula.transport import Key, Link, LinkTotals
from whale_nebula.transport.memory import MemoryLink, MemoryNetwork
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


@pytest.mark.parametrize(
    ("line", "sent", "arrivals"),
    [
        (Line(RATE, 0.25), [(0.0, key(0))], [1.25]),
        (Line(RATE, 0.25), [(0.0, key(0)), (0.0, key(1)), (0.0, key(2))], [1.25, 2.25, 3.25]),
        (Line(RATE, 0.25), [(0.0, key(0)), (0.0, back(0))], [1.25, 1.25]),
        (Line(RATE, 0.25), [(0.0, key(0)), (5.0, key(1))], [5.0, 6.25]),
        (Line(None, 0.5), [(0.0, key(slot)) for slot in range(4)], [0.5] * 4),
    ],
    ids=["rate and delay", "a queue", "both directions", "after a pause", "a delay alone"],
)
def test_when_what_is_sent_over_a_line_arrives(
    clock: FakeClock, line: Line, sent: list[tuple[float, Key]], arrivals: list[float]
) -> None:
    ends = {link.here: link for link in memory_pair(MemoryNetwork({("gpu", "npu"): line}, clock=clock))}
    for at, each in sent:
        clock.time = at
        ends[each.source].send(each, TENSOR)
    found = []
    for _, each in sent:
        ends[each.destination].receive(each, 10.0)
        found.append(clock.now())
    assert found == pytest.approx(arrivals)


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


def test_it_is_told_when_each_tensor_holds_the_line(line: tuple, clock: FakeClock) -> None:
    told: list[tuple[Key, int, float, float]] = []
    line[0].on_sent = lambda *about: told.append(about)
    for slot in (0, 1):
        line[0].send(key(slot), TENSOR)
    line[0].post({"kind": "PING", "last": False})  # control messages are not told
    assert told == [(key(0), 1_000_000, 0.0, 1.0), (key(1), 1_000_000, 1.0, 2.0)]


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


def test_a_last_failure_comes_after_what_was_sent(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(key(0), TENSOR)
    here.fail({"what": "division by zero"}, last=True)
    there.receive(key(0), 10.0)
    with pytest.raises(RemoteFailureError, match="'gpu/0' failed: division by zero"):
        there.receive(key(1), 10.0)
    there.send(back(), TENSOR)


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
    with pytest.raises(LocalProtocolError, match="the size of"):
        here.send(key(0), thing)
    here.send(key(0), thing, size=12)
    assert there.receive(key(0), 1.0) is thing
    assert here.totals().payload_bytes == 12


def test_what_a_real_link_refuses_is_refused_here_too() -> None:
    here, _ = memory_pair(MemoryNetwork())
    with pytest.raises(LocalProtocolError, match="object"):
        here.send(key(), np.array(["a", None]))
    with pytest.raises(LocalProtocolError, match="is not a tensor from"):
        here.send(back(), TENSOR)
    with pytest.raises(LocalProtocolError, match="is not a tensor from"):
        here.receive(key(), 1.0)
    with pytest.raises(LocalProtocolError, match="cannot post"):
        here.post({"kind": "BYE"})
    here.send(key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="was received twice"):
        here.send(key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="itself"):
        MemoryNetwork().link("gpu/0", "gpu/0", "gpu", "gpu")
