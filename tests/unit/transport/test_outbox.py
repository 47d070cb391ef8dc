"""The queue of outgoing messages: order, budget, end."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.unit.gateway.networks import wait_until
from tests.unit.wire.conversations import STEP, frame_message, open_pair
from whale_nebula.errors import DeadlineError
from whale_nebula.transport.mailbox import Waiters
from whale_nebula.transport.outbox import Outbox, OutgoingItem
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Header, Kind, count_wire_bytes
from whale_nebula.wire.tensor import find_dtype_code


def make_item(size: int, kind: Kind = Kind.SCALAR) -> OutgoingItem:
    header = Header(kind, source=0, destination=1, program=7, dtype=find_dtype_code("uint8"), dims=(size,))
    return OutgoingItem(header, np.zeros(size, np.uint8))


def make_message(number: int) -> OutgoingItem:
    (frame,) = frame_message(0, {"kind": "PONG", "clock": number})
    return OutgoingItem(frame[0]._replace(flags=0, length=0, whole=0), frame[1])


def make_outbox(budget: int, **options: Any) -> Outbox:
    """An outbox of a side that is in a step and has a connection."""
    outbox = Outbox(open_pair(stepping=True)[0], budget, heartbeat_interval=1000.0, **options)
    outbox.connect(1, ())
    return outbox


def take_sizes(outbox: Outbox, count: int) -> list[int | None]:
    """The payloads of the next frames; None where there is none."""
    return [
        None if outgoing is None else outgoing.packet[1].size for outgoing in (outbox.take_next() for _ in range(count))
    ]


def run_in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start the call in a thread; returns a function that waits for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return lambda: future.result(20.0)


def test_item_size_is_its_bytes_on_the_wire() -> None:
    assert make_item(3 * CHUNK_BYTES).size == count_wire_bytes(3 * CHUNK_BYTES)
    assert make_item(3 * CHUNK_BYTES, Kind.CONTROL).size == 3 * CHUNK_BYTES + HEADER_BYTES


def test_urgent_item_is_sent_between_frames_of_others() -> None:
    outbox = make_outbox(1 << 30)
    for size in (CHUNK_BYTES + 1, 3):
        assert outbox.put(make_item(size), 1.0, "npu/0")
    assert take_sizes(outbox, 1) == [CHUNK_BYTES]
    urgent = make_message(5)
    outbox.queue_urgent(urgent)
    assert take_sizes(outbox, 4) == [urgent.payload.size, 1, 3, None]


def test_acknowledged_item_is_released() -> None:
    conversation, other = open_pair(stepping=True)
    outbox = Outbox(conversation, 1 << 30, heartbeat_interval=1000.0)
    outbox.connect(1, ())
    item = make_item(2 * CHUNK_BYTES)
    payload_reference = weakref.ref(item.payload)
    outbox.put(item, 1.0, "npu/0")
    for _ in range(2):
        outgoing = outbox.take_next()
        assert outgoing is not None
        other.receive(b"".join(map(bytes, outgoing.packet)))
    heartbeat = b"".join(map(bytes, other.build_heartbeat()))
    del item, outgoing
    conversation.receive(heartbeat)
    assert payload_reference() is None


def test_item_above_the_budget_waits_for_room() -> None:
    waiting = Waiters()
    outbox = make_outbox(1000 + 2 * HEADER_BYTES, enter_wait=waiting.enter_wait)
    outbox.put(make_item(600), 1.0, "npu/0")
    with pytest.raises(DeadlineError, match="to send to worker 'npu/0'"):
        outbox.put(make_item(601), 0.01, "npu/0")
    result = run_in_thread(lambda: outbox.put(make_item(601), 20.0, "npu/0"))
    outgoing = outbox.take_next()
    assert outgoing is not None
    wait_until(lambda: waiting.count == 1)  # while a sender waits, this process blocks no other sender
    outbox.release_budget(outgoing.share)
    assert result() is True and waiting.count == 0
    assert take_sizes(outbox, 2) == [601, None]
    assert outbox.written_bytes == make_item(600).size


def test_item_larger_than_the_budget_is_accepted_alone() -> None:
    outbox = make_outbox(10)
    assert outbox.put(make_item(1000), 1.0, "npu/0")
    with pytest.raises(DeadlineError):
        outbox.put(make_item(1), 0.01, "npu/0")


def test_finish_sends_queued_items_and_the_farewell() -> None:
    outbox = make_outbox(10_000)
    farewell = make_message(6)
    outbox.put(make_item(1), 1.0, "npu/0")
    assert outbox.finish(farewell)
    assert not outbox.finish(make_item(3))
    assert outbox.put(make_item(4), 1.0, "npu/0") is False
    assert not outbox.is_drained
    assert take_sizes(outbox, 3) == [1, farewell.payload.size, None]
    assert outbox.is_drained


@pytest.mark.parametrize("end", ["finish", "stop", "drop_queued", "queue_last"])
def test_end_releases_a_blocked_sender(end: str) -> None:
    outbox = make_outbox(10)
    outbox.put(make_item(1000), 1.0, "npu/0")
    result = run_in_thread(lambda: outbox.put(make_item(1), 20.0, "npu/0"))
    getattr(outbox, end)(*([make_message(7)] if end == "queue_last" else []))
    assert result() is False


def test_last_item_is_sent_after_all_others() -> None:
    outbox, last, urgent = make_outbox(10), make_message(7), make_message(8)
    outbox.put(make_item(1000), 1.0, "npu/0")
    assert outbox.queue_last(last) and not outbox.put(make_item(1), 1.0, "npu/0")
    assert take_sizes(outbox, 3) == [1000, last.payload.size, None]
    assert outbox.queue_urgent(urgent) and take_sizes(outbox, 1) == [urgent.payload.size]
    outbox.drop_queued()
    assert not outbox.queue_last(last)


def test_drop_queued_drops_all_but_urgent_items() -> None:
    outbox = make_outbox(1 << 30)
    outbox.put(make_item(2 * CHUNK_BYTES), 1.0, "npu/0")
    assert take_sizes(outbox, 1) == [CHUNK_BYTES]
    outbox.put(make_item(2), 1.0, "npu/0")
    outbox.drop_queued()
    urgent = make_message(7)
    outbox.queue_urgent(urgent)
    assert take_sizes(outbox, 2) == [urgent.payload.size, None]


@pytest.mark.parametrize("end", ["put", "queue_urgent", "queue_last", "finish", "drop_queued"])
def test_queued_bytes_are_those_of_frames_that_have_not_left(end: str) -> None:
    outbox, sent = make_outbox(1 << 30), 0
    first, second, message = make_item(2 * CHUNK_BYTES), make_item(5), make_message(7)
    outbox.put(first, 1.0, "npu/0")
    outbox.put(second, 1.0, "npu/0")
    outgoing = outbox.take_next()  # half of the first item, whose other half is dropped with the second
    more = {"put": (message, 1.0, "npu/0"), "drop_queued": ()}.get(end, (message,))
    getattr(outbox, end)(*more)
    expected = first.size + second.size + message.size if more else outgoing.share
    while outgoing is not None:
        assert outbox.queued_bytes == expected - sent
        outbox.release_budget(outgoing.share)
        sent += outgoing.share
        outgoing = outbox.take_next()
    assert outbox.queued_bytes == 0 and outbox.written_bytes == expected


def test_answers_and_resent_frames_precede_new_items() -> None:
    outbox = make_outbox(10_000)
    outbox.put(make_item(5), 1.0, "npu/0")
    frames = [(bytes(3), np.zeros(size, np.uint8)) for size in (1, 2)]
    outbox.queue_resent(frames[1:])
    outbox.answer(frames[:1])
    assert take_sizes(outbox, 4) == [1, 2, 5, None]
    outbox.mark_broken(2)
    assert outbox.connection == 1
    outbox.mark_broken(1)
    assert outbox.put(OutgoingItem(*frame_message(0, STEP)[0]), 1.0, "npu/0") and outbox.take_next() is None
