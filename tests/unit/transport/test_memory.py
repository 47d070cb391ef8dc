"""Memory links: the protocol, and emulated lines."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.unit.transport.link_pairs import FakeClock, make_back_key, make_key, make_memory_pair
from whale_nebula.errors import LinkClosedError, LocalProtocolError, RemoteFailureError
from whale_nebula.transport import Key, Link, LinkTotals
from whale_nebula.transport.memory import MemoryLink, MemoryNetwork
from whale_nebula.wire.frame import HEADER_BYTES


@dataclass(frozen=True)
class LineSettings:
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
    return make_memory_pair(MemoryNetwork({("gpu", "npu"): LineSettings(RATE, 0.25)}, clock=clock))


def test_tensor_is_passed_by_reference() -> None:
    here, there = make_memory_pair(MemoryNetwork())
    link: Link = here
    array = np.arange(3)
    link.send(make_key(), array)
    assert there.receive(make_key(), 1.0) is array


@pytest.mark.parametrize(
    ("line", "sent", "arrivals"),
    [
        (LineSettings(RATE, 0.25), [(0.0, make_key(0))], [1.25]),
        (LineSettings(RATE, 0.25), [(0.0, make_key(0)), (0.0, make_key(1)), (0.0, make_key(2))], [1.25, 2.25, 3.25]),
        (LineSettings(RATE, 0.25), [(0.0, make_key(0)), (0.0, make_back_key(0))], [1.25, 1.25]),
        (LineSettings(RATE, 0.25), [(0.0, make_key(0)), (5.0, make_key(1))], [5.0, 6.25]),
        (LineSettings(None, 0.5), [(0.0, make_key(slot)) for slot in range(4)], [0.5] * 4),
    ],
    ids=["rate and delay", "a queue", "both directions", "after a pause", "a delay alone"],
)
def test_arrival_times_follow_rate_and_delay(
    clock: FakeClock, line: LineSettings, sent: list[tuple[float, Key]], arrivals: list[float]
) -> None:
    ends = {link.here: link for link in make_memory_pair(MemoryNetwork({("gpu", "npu"): line}, clock=clock))}
    for at, each in sent:
        clock.time = at
        ends[each.source].send(each, TENSOR)
    found = []
    for _, each in sent:
        ends[each.destination].receive(each, 10.0)
        found.append(clock.now())
    assert found == pytest.approx(arrivals)


def test_workers_of_two_clusters_share_their_line(clock: FakeClock) -> None:
    network = MemoryNetwork({("npu", "gpu"): LineSettings(RATE)}, clock=clock)
    for worker in ("0", "1"):
        network.link(f"gpu/{worker}", f"npu/{worker}", "gpu", "npu").send(
            make_key(0, 0, f"gpu/{worker}", f"npu/{worker}"), TENSOR
        )
    network.link("npu/1", "gpu/1", "npu", "gpu").receive(make_key(0, 0, "gpu/1", "npu/1"), 10.0)
    assert clock.now() == pytest.approx(2.0)


def test_links_without_a_line_are_free(clock: FakeClock) -> None:
    network = MemoryNetwork(
        {("gpu", "npu"): LineSettings(RATE, 1.0), ("gpu", "gpu"): LineSettings(RATE, 1.0)}, clock=clock
    )
    for there, cluster in (("gpu/1", "gpu"), ("tpu/0", "tpu")):
        network.link("gpu/0", there, "gpu", cluster).send(make_key(0, 0, "gpu/0", there), TENSOR)
        network.link(there, "gpu/0", cluster, "gpu").receive(make_key(0, 0, "gpu/0", there), 10.0)
    assert clock.now() == 0.0


def test_on_sent_reports_when_each_tensor_occupies_the_line(line: tuple, clock: FakeClock) -> None:
    sent_reports: list[tuple[Key, int, float, float]] = []
    line[0].on_sent = lambda *about: sent_reports.append(about)
    for slot in (0, 1):
        line[0].send(make_key(slot), TENSOR)
    line[0].post({"kind": "PING", "last": False})  # control messages are not told
    assert sent_reports == [(make_key(0), 1_000_000, 0.0, 1.0), (make_key(1), 1_000_000, 1.0, 2.0)]


def test_messages_are_copied_and_occupy_the_line(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(make_key(), TENSOR)
    message = {"kind": "PING", "last": True, "found": [1, 2]}
    here.post(message)
    message["found"].append(3)
    assert there.take("PING", 10.0) == {"kind": "PING", "last": True, "found": [1, 2]}
    assert clock.now() == pytest.approx(1.25, abs=0.001)
    assert clock.now() > 1.25


def test_failure_overtakes_queued_tensors(line: tuple, clock: FakeClock) -> None:
    here, there = line
    for slot in range(5):
        here.send(make_key(slot), TENSOR)
    here.fail({"what": "division by zero", "why": "because", "where": 3})
    with pytest.raises(RemoteFailureError, match="'gpu/0' failed: division by zero"):
        there.receive(make_key(4), 10.0)
    assert clock.now() == pytest.approx(0.25, abs=0.001)


def test_last_failure_arrives_after_sent_tensors(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(make_key(0), TENSOR)
    here.fail({"what": "division by zero"}, last=True)
    there.receive(make_key(0), 10.0)
    with pytest.raises(RemoteFailureError, match="'gpu/0' failed: division by zero"):
        there.receive(make_key(1), 10.0)
    there.send(make_back_key(), TENSOR)


def test_close_arrives_after_sent_tensors(line: tuple, clock: FakeClock) -> None:
    here, there = line
    here.send(make_key(0), TENSOR)
    here.close()
    here.close()
    there.receive(make_key(0), 10.0)
    with pytest.raises(LinkClosedError, match="'gpu/0' has closed"):
        there.receive(make_key(1), 10.0)
    with pytest.raises(LinkClosedError, match="'gpu/0' has closed"):
        there.send(make_back_key(), TENSOR)
    for attempt in (lambda: here.send(make_key(1), TENSOR), lambda: here.receive(make_back_key(), 1.0)):
        with pytest.raises(LinkClosedError, match="has closed its link to 'npu/0'"):
            attempt()


def test_totals_count_tensors_headers_and_messages() -> None:
    here, there = make_memory_pair(MemoryNetwork())
    here.send(make_key(0), np.zeros(10, np.float16), raw_bytes=40)
    here.send(make_key(1), np.zeros((0, 5)))
    before = here.totals()
    assert before == LinkTotals(payload_bytes=20, bytes=20 + 2 * HEADER_BYTES, raw_bytes=40, frames=2)
    here.post({"kind": "PING", "last": True})
    assert here.totals() - before == LinkTotals(bytes=len('{"kind":"PING","last":true}') + HEADER_BYTES, frames=1)
    assert there.totals() == LinkTotals()


def test_object_is_sent_if_its_size_is_given() -> None:
    here, there = make_memory_pair(MemoryNetwork())
    thing = object()
    with pytest.raises(LocalProtocolError, match="the size of"):
        here.send(make_key(0), thing)
    here.send(make_key(0), thing, size=12)
    assert there.receive(make_key(0), 1.0) is thing
    assert here.totals().payload_bytes == 12


def test_memory_link_refuses_what_other_links_refuse() -> None:
    here, _ = make_memory_pair(MemoryNetwork())
    with pytest.raises(LocalProtocolError, match="object"):
        here.send(make_key(), np.array(["a", None]))
    with pytest.raises(LocalProtocolError, match="is not a tensor from"):
        here.send(make_back_key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="is not a tensor from"):
        here.receive(make_key(), 1.0)
    with pytest.raises(LocalProtocolError, match="cannot post"):
        here.post({"kind": "BYE"})
    here.send(make_key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="was received twice"):
        here.send(make_key(), TENSOR)
    with pytest.raises(LocalProtocolError, match="itself"):
        MemoryNetwork().link("gpu/0", "gpu/0", "gpu", "gpu")
