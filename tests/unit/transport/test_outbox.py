"""The queue of outgoing messages: order, budget, end."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.unit.gateway.town import until
from tests.unit.wire.conversations import STEP, frame_message, open_pair
from whale_nebula.errors import DeadlineError
from whale_nebula.transport.mailbox import Waiters
from whale_nebula.transport.outbox import Outbox, Parcel
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Header, Kind, wire_bytes
from whale_nebula.wire.tensor import dtype_code


def parcel(size: int, kind: Kind = Kind.SCALAR) -> Parcel:
    header = Header(kind, source=0, destination=1, program=7, dtype=dtype_code("uint8"), dims=(size,))
    return Parcel(header, np.zeros(size, np.uint8))


def message(number: int) -> Parcel:
    (frame,) = frame_message(0, {"kind": "PONG", "clock": number})
    return Parcel(frame[0]._replace(flags=0, length=0, whole=0), frame[1])


def outbox(budget: int, **options: Any) -> Outbox:
    """One whose side is in a step, and has a connection."""
    made = Outbox(open_pair(stepping=True)[0], budget, beat=1000.0, **options)
    made.connect(1, ())
    return made


def sizes(out: Outbox, count: int) -> list[int | None]:
    """The payloads of the next frames; None where there is none."""
    return [None if shipment is None else shipment.packet[1].size for shipment in (out.next() for _ in range(count))]


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start the call; what this gives waits for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return lambda: future.result(20.0)


def test_a_parcel_knows_its_bytes_on_the_wire() -> None:
    assert parcel(3 * CHUNK_BYTES).size == wire_bytes(3 * CHUNK_BYTES)
    assert parcel(3 * CHUNK_BYTES, Kind.CONTROL).size == 3 * CHUNK_BYTES + HEADER_BYTES


def test_parcels_leave_in_order_and_urgent_ones_between_their_frames() -> None:
    out = outbox(1 << 30)
    for size in (CHUNK_BYTES + 1, 3):
        assert out.put(parcel(size), 1.0, "npu/0")
    assert sizes(out, 1) == [CHUNK_BYTES]
    urgent = message(5)
    out.put_urgent(urgent)
    assert sizes(out, 4) == [urgent.payload.size, 1, 3, None]


def test_of_a_parcel_that_has_left_only_frames_to_repeat_are_held() -> None:
    talk, other = open_pair(stepping=True)
    out = Outbox(talk, 1 << 30, beat=1000.0)
    out.connect(1, ())
    sent = parcel(2 * CHUNK_BYTES)
    gone = weakref.ref(sent.payload)
    out.put(sent, 1.0, "npu/0")
    for _ in range(2):
        shipment = out.next()
        assert shipment is not None
        other.receive(b"".join(map(bytes, shipment.packet)))
    beat = b"".join(map(bytes, other.beat()))
    del sent, shipment
    talk.receive(beat)
    assert gone() is None


def test_what_is_above_the_budget_waits_until_something_has_left() -> None:
    waiting = Waiters()
    out = outbox(1000 + 2 * HEADER_BYTES, waiting=waiting.waiting)
    out.put(parcel(600), 1.0, "npu/0")
    with pytest.raises(DeadlineError, match="to send to worker 'npu/0'"):
        out.put(parcel(601), 0.01, "npu/0")
    result = in_thread(lambda: out.put(parcel(601), 20.0, "npu/0"))
    shipment = out.next()
    assert shipment is not None
    until(lambda: waiting.count == 1)  # as long as a sender waits, the process holds nobody
    out.done(shipment.share)
    assert result() is True and waiting.count == 0
    assert sizes(out, 2) == [601, None]
    assert out.written == parcel(600).size


def test_a_parcel_larger_than_the_budget_goes_alone() -> None:
    out = outbox(10)
    assert out.put(parcel(1000), 1.0, "npu/0")
    with pytest.raises(DeadlineError):
        out.put(parcel(1), 0.01, "npu/0")


def test_finishing_lets_out_what_is_there_and_the_farewell() -> None:
    out = outbox(10_000)
    farewell = message(6)
    out.put(parcel(1), 1.0, "npu/0")
    assert out.finish(farewell)
    assert not out.finish(parcel(3))
    assert out.put(parcel(4), 1.0, "npu/0") is False
    assert not out.drained
    assert sizes(out, 3) == [1, farewell.payload.size, None]
    assert out.drained


@pytest.mark.parametrize("end", ["finish", "stop", "forget", "put_last"])
def test_the_end_frees_who_is_blocked(end: str) -> None:
    out = outbox(10)
    out.put(parcel(1000), 1.0, "npu/0")
    result = in_thread(lambda: out.put(parcel(1), 20.0, "npu/0"))
    getattr(out, end)(*([message(7)] if end == "put_last" else []))
    assert result() is False


def test_the_last_parcel_leaves_behind_all_others_and_what_is_urgent_ahead() -> None:
    out, last, urgent = outbox(10), message(7), message(8)
    out.put(parcel(1000), 1.0, "npu/0")
    assert out.put_last(last) and not out.put(parcel(1), 1.0, "npu/0")
    assert sizes(out, 3) == [1000, last.payload.size, None]
    assert out.put_urgent(urgent) and sizes(out, 1) == [urgent.payload.size]
    out.forget()
    assert not out.put_last(last)


def test_what_is_forgotten_does_not_leave_and_what_is_urgent_does() -> None:
    out = outbox(1 << 30)
    out.put(parcel(2 * CHUNK_BYTES), 1.0, "npu/0")
    assert sizes(out, 1) == [CHUNK_BYTES]
    out.put(parcel(2), 1.0, "npu/0")
    out.forget()
    urgent = message(7)
    out.put_urgent(urgent)
    assert sizes(out, 2) == [urgent.payload.size, None]


def test_what_the_greeting_and_a_cut_left_goes_before_anything_new() -> None:
    out = outbox(10_000)
    out.put(parcel(5), 1.0, "npu/0")
    frames = [(bytes(3), np.zeros(size, np.uint8)) for size in (1, 2)]
    out.again(frames[1:])
    out.answer(frames[:1])
    assert sizes(out, 4) == [1, 2, 5, None]
    out.broken(2)
    assert out.connection == 1
    out.broken(1)
    assert out.put(Parcel(*frame_message(0, STEP)[0]), 1.0, "npu/0") and out.next() is None
