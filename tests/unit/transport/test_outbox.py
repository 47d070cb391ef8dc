"""The queue before the writer: order, budget, end."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from whale_nebula.errors import DeadlineError
from whale_nebula.transport.outbox import Outbox, Parcel
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Header, Kind, wire_bytes


def parcel(size: int, kind: Kind = Kind.SCALAR) -> Parcel:
    return Parcel(Header(kind, dims=(size,)), np.zeros(size, np.uint8))


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start the call; what this gives waits for its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def join() -> object:
        thread.join(20.0)
        assert not thread.is_alive()
        return results[0]

    return join


def test_a_parcel_knows_its_bytes_on_the_wire() -> None:
    assert parcel(3 * CHUNK_BYTES).size == wire_bytes(3 * CHUNK_BYTES)
    assert parcel(3 * CHUNK_BYTES, Kind.CONTROL).size == 3 * CHUNK_BYTES + HEADER_BYTES


def test_parcels_leave_in_order_and_urgent_ones_first() -> None:
    outbox = Outbox(10_000)
    parcels = [parcel(size) for size in (1, 2, 3)]
    for each in parcels[:2]:
        assert outbox.put(each, 1.0, "npu/0")
    outbox.put_urgent(parcels[2])
    assert [outbox.get() for _ in range(3)] == [parcels[2], parcels[0], parcels[1]]
    assert outbox.get_urgent() is None


def test_what_is_above_the_budget_waits_until_something_has_left() -> None:
    outbox = Outbox(1000 + 2 * HEADER_BYTES)
    first, second = parcel(600), parcel(600)
    outbox.put(first, 1.0, "npu/0")
    with pytest.raises(DeadlineError, match="to send to worker 'npu/0'"):
        outbox.put(second, 0.01, "npu/0")
    result = in_thread(lambda: outbox.put(second, 20.0, "npu/0"))
    assert outbox.get() is first
    outbox.done(first.size)
    assert result() is True
    assert outbox.get() is second
    assert outbox.written == first.size


def test_a_parcel_larger_than_the_budget_goes_alone() -> None:
    outbox = Outbox(10)
    assert outbox.put(parcel(1000), 1.0, "npu/0")
    with pytest.raises(DeadlineError):
        outbox.put(parcel(1), 0.01, "npu/0")


def test_finishing_lets_out_what_is_there_and_the_farewell() -> None:
    outbox = Outbox(10_000)
    first, farewell = parcel(1), parcel(2)
    outbox.put(first, 1.0, "npu/0")
    assert outbox.finish(farewell)
    assert not outbox.finish(parcel(3))
    assert outbox.put(parcel(4), 1.0, "npu/0") is False
    assert [outbox.get() for _ in range(3)] == [first, farewell, None]


@pytest.mark.parametrize("end", ["finish", "stop"])
def test_the_end_frees_who_is_blocked(end: str) -> None:
    outbox = Outbox(10)
    outbox.put(parcel(1000), 1.0, "npu/0")
    result = in_thread(lambda: outbox.put(parcel(1), 20.0, "npu/0"))
    getattr(outbox, end)()
    assert result() is False


def test_stopping_drops_what_is_there_and_frees_the_writer() -> None:
    outbox = Outbox(10_000)
    result = in_thread(outbox.get)
    outbox.stop()
    assert result() is None
    assert outbox.get() is None
