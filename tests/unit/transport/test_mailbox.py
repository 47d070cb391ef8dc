"""The mailbox: by key in any order, each once, none late, and an end that all readers notice."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport.link_pairs import FakeClock
from whale_nebula.errors import (
    DeadlineError,
    LinkClosedError,
    LocalProtocolError,
    RemoteFailureError,
    RemoteProtocolError,
)
from whale_nebula.transport.mailbox import Mailbox
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import count_held_bytes


def make_key(slot: int = 0, step: int = 0, program: int = 1) -> Key:
    return Key("forward", program, step, 0, -1, slot, "npu/0", "gpu/0")


@pytest.fixture
def clock() -> FakeClock:
    clock = FakeClock()
    clock.time = 100.0
    return clock


@pytest.fixture
def mailbox(clock: FakeClock) -> Mailbox:
    return Mailbox("gpu/0", "npu/0", clock=clock)


def test_tensors_may_be_taken_in_any_order(mailbox: Mailbox, clock: FakeClock) -> None:
    for slot in range(3):
        mailbox.put(make_key(slot), f"tensor {slot}")
    assert [mailbox.take(make_key(slot), 1.0) for slot in (2, 0, 1)] == ["tensor 2", "tensor 0", "tensor 1"]
    assert clock.now() == 100.0


def test_take_waits_for_a_tensor_in_transit(mailbox: Mailbox, clock: FakeClock) -> None:
    mailbox.put(make_key(), "tensor", due=103.5)
    assert mailbox.take(make_key(), 10.0) == "tensor"
    assert clock.now() == 103.5


def test_deadline_error_names_worker_tensor_and_seconds(mailbox: Mailbox, clock: FakeClock) -> None:
    with pytest.raises(DeadlineError) as caught:
        mailbox.take(make_key(slot=7, step=3), 2.5)
    assert clock.now() == 102.5
    assert "'gpu/0' waited 2.5 s for worker 'npu/0'" in str(caught.value)
    assert "boundary 7 (step 3, phase 0) from npu/0 to gpu/0" in str(caught.value)


def test_missing_message_raises_a_deadline_error(mailbox: Mailbox) -> None:
    with pytest.raises(DeadlineError, match="message AGREE from npu/0"):
        mailbox.take_message("AGREE", 1.0)


def test_duplicate_key_is_refused(mailbox: Mailbox) -> None:
    mailbox.put(make_key(), 1)
    with pytest.raises(LocalProtocolError, match="was received twice"):
        mailbox.put(make_key(), 2)
    assert mailbox.take(make_key(), 1.0) == 1
    with pytest.raises(LocalProtocolError, match="was received twice"):
        mailbox.put(make_key(), 3)
    with pytest.raises(LocalProtocolError, match="already received"):
        mailbox.take(make_key(), 1.0)


def test_key_of_an_earlier_step_is_refused(mailbox: Mailbox) -> None:
    mailbox.put(make_key(0, step=5), "five")
    mailbox.put(make_key(0, step=4), "four, before a tensor of five was taken")
    mailbox.put(make_key(0, step=6), "six")
    mailbox.take(make_key(0, step=5), 1.0)
    with pytest.raises(LocalProtocolError, match="is late"):
        mailbox.put(make_key(1, step=4), "four")
    mailbox.put(make_key(0, step=4, program=2), "another program has its own steps")
    assert mailbox.take(make_key(0, step=4), 1.0).startswith("four")
    assert mailbox.take(make_key(0, step=6), 1.0) == "six"


def test_awaited_key_of_an_earlier_step_is_accepted() -> None:
    mailbox = Mailbox("gpu/0", "npu/0")
    mailbox.put(make_key(0, step=5), "five")
    mailbox.take(make_key(0, step=5), 1.0)
    results = start_threads(lambda: mailbox.take(make_key(9, step=4), 10.0))
    while make_key(9, step=4) not in mailbox._awaited_keys:
        pass
    mailbox.put(make_key(9, step=4), "late, but requested")
    assert results() == ["late, but requested"]


def test_arrived_tensor_can_be_taken_after_the_end(mailbox: Mailbox) -> None:
    mailbox.put(make_key(0), "there")
    mailbox.end(lambda: LinkClosedError("gone"))
    assert mailbox.take(make_key(0), 1.0) == "there"
    for attempt in (lambda: mailbox.take(make_key(1), 1.0), lambda: mailbox.take_message("A", 1.0), mailbox.check_open):
        with pytest.raises(LinkClosedError, match="gone"):
            attempt()


def test_tensor_in_transit_arrives_before_a_later_end(mailbox: Mailbox, clock: FakeClock) -> None:
    mailbox.put(make_key(), "there", due=101.0)
    mailbox.end(lambda: LinkClosedError("gone"), due=101.5)
    assert mailbox.take(make_key(), 5.0) == "there"
    with pytest.raises(LinkClosedError):
        mailbox.take(make_key(1), 5.0)
    assert clock.now() == 101.5


def test_failure_precedes_tensors_and_replaces_a_close(mailbox: Mailbox) -> None:
    mailbox.put(make_key(), "there")
    mailbox.end(lambda: LinkClosedError("gone"))
    mailbox.end(lambda: RemoteFailureError("failed"), at_once=True)
    mailbox.end(lambda: LinkClosedError("gone again"), at_once=True)
    with pytest.raises(RemoteFailureError, match="failed"):
        mailbox.take(make_key(), 1.0)


def test_failure_in_transit_is_raised_on_arrival(mailbox: Mailbox, clock: FakeClock) -> None:
    mailbox.end(lambda: RemoteFailureError("failed"), due=102.0, at_once=True)
    mailbox.check_open()
    mailbox.put(make_key(), "sooner", due=101.0)
    assert mailbox.take(make_key(), 5.0) == "sooner"
    mailbox.put(make_key(1), "later", due=103.0)
    with pytest.raises(RemoteFailureError):
        mailbox.take(make_key(1), 5.0)
    assert clock.now() == 102.0


def test_close_takes_effect_once(mailbox: Mailbox) -> None:
    mailbox.put(make_key(), "there")
    assert mailbox.close(lambda: LinkClosedError("closed here"))
    assert not mailbox.close(lambda: LinkClosedError("closed twice"))
    with pytest.raises(LinkClosedError, match="closed here"):
        mailbox.take(make_key(), 1.0)


def test_received_failure_stays_the_reason_after_close(mailbox: Mailbox) -> None:
    mailbox.end(lambda: RemoteFailureError("failed"), at_once=True)
    mailbox.close(lambda: LinkClosedError("closed here"))
    with pytest.raises(RemoteFailureError):
        mailbox.check_open()


def start_threads(*attempts: Callable[[], object]) -> Callable[[], list[object]]:
    """Start each attempt in a thread; returns a function that waits for their results or errors."""
    pool = ThreadPoolExecutor(len(attempts))
    futures = [pool.submit(attempt) for attempt in attempts]
    pool.shutdown(wait=False)
    return lambda: [future.exception(20.0) or future.result() for future in futures]


def test_end_wakes_all_waiters_with_separate_errors() -> None:
    mailbox = Mailbox("gpu/0", "npu/0")
    results = start_threads(*(lambda slot=slot: mailbox.take(make_key(slot), 10.0) for slot in range(4)))
    mailbox.end(lambda: LinkClosedError("gone"))
    errors = results()
    assert all(isinstance(error, LinkClosedError) for error in errors)
    assert len({id(error) for error in errors}) == 4


def test_announced_key_may_arrive_after_later_steps(mailbox: Mailbox) -> None:
    mailbox.announce_receive(make_key(slot=7, step=0))
    mailbox.put(make_key(step=1), "of the next step")
    assert mailbox.take(make_key(step=1), 1.0) == "of the next step"
    mailbox.put(make_key(slot=7, step=0), "late")
    assert mailbox.take(make_key(slot=7, step=0), 1.0) == "late"


def test_arrived_announced_tensor_can_be_taken_after_a_failure(mailbox: Mailbox) -> None:
    mailbox.announce_receive(make_key(slot=7))
    mailbox.put(make_key(slot=7), "promised")
    mailbox.put(make_key(slot=8), "not announced")
    mailbox.end(lambda: RemoteFailureError("npu/0 failed"), at_once=True)
    assert mailbox.take(make_key(slot=7), 1.0) == "promised"
    with pytest.raises(RemoteFailureError):
        mailbox.take(make_key(slot=8), 1.0)


class TestWindow:
    """Unrequested data in a mailbox is counted, and determines when its sender is blocked."""

    SIZE = 4096

    @pytest.fixture
    def flow_changes(self) -> list[bool]:
        return []

    @pytest.fixture
    def bounded_mailbox(self, clock: FakeClock, flow_changes: list[bool]) -> Mailbox:
        mailbox = Mailbox(
            "gpu/0", "npu/0", fault=RemoteProtocolError, clock=clock, window=2 * count_held_bytes(self.SIZE)
        )
        mailbox.on_room = lambda: flow_changes.append(mailbox.accepts_data)
        return mailbox

    def fill(self, mailbox: Mailbox, count: int, step: int = 0, kind: str = "forward") -> list[Key]:
        keys = [replace_kind(make_key(slot, step), kind) for slot in range(count)]
        for each in keys:
            mailbox.put(each, np.zeros(self.SIZE, np.uint8))
        return keys

    def test_mailbox_accepts_data_until_the_window_is_full(
        self, bounded_mailbox: Mailbox, flow_changes: list[bool]
    ) -> None:
        first, *_ = self.fill(bounded_mailbox, 2)
        assert bounded_mailbox.accepts_data
        self.fill(bounded_mailbox, 3, step=1)
        assert not bounded_mailbox.accepts_data and flow_changes == []
        bounded_mailbox.take(first, 0.0)
        assert not bounded_mailbox.accepts_data
        for slot in range(2):
            bounded_mailbox.take(make_key(slot, 1), 0.0)
        assert bounded_mailbox.accepts_data and flow_changes == [True]

    def test_requested_tensors_do_not_count(self, bounded_mailbox: Mailbox, flow_changes: list[bool]) -> None:
        for slot in range(3):
            bounded_mailbox.announce_receive(make_key(slot))
        self.fill(bounded_mailbox, 3)
        assert (bounded_mailbox.unrequested_bytes, bounded_mailbox.accepts_data) == (0, True)
        self.fill(bounded_mailbox, 3, step=1)
        assert not bounded_mailbox.accepts_data
        bounded_mailbox.announce_receive(make_key(0, 1))
        assert (bounded_mailbox.unrequested_bytes, flow_changes) == (2 * count_held_bytes(self.SIZE), [True])
        for slot in range(3):
            bounded_mailbox.take(make_key(slot, 1), 0.0)
        assert bounded_mailbox.unrequested_bytes == 0

    def test_mailbox_accepts_data_during_a_wait(self, bounded_mailbox: Mailbox, flow_changes: list[bool]) -> None:
        self.fill(bounded_mailbox, 3)
        flow_states: list[bool] = []
        bounded_mailbox._clock.wait = lambda condition, seconds: (
            flow_states.append(bounded_mailbox.accepts_data),
            bounded_mailbox.put(make_key(9), SMALL),
        )
        bounded_mailbox.take(make_key(9), 1.0)
        assert (flow_states, flow_changes, bounded_mailbox.accepts_data) == ([True], [True], False)
        with pytest.raises(DeadlineError):
            bounded_mailbox.take_message("SESSION", 0.0)  # a timeout of 0 does not wait
        assert flow_changes == [True]

    def test_messages_count_by_their_memory(self, bounded_mailbox: Mailbox) -> None:
        bounded_mailbox.put_message({"kind": "SESSION"}, size=1000)
        assert not bounded_mailbox.accepts_data
        bounded_mailbox.take_message("SESSION", 0.0)
        assert (bounded_mailbox.unrequested_bytes, bounded_mailbox.accepts_data) == (0, True)

    def test_closed_mailbox_accepts_and_drops_data(self, bounded_mailbox: Mailbox) -> None:
        self.fill(bounded_mailbox, 3)
        bounded_mailbox.close(lambda: LinkClosedError("closed"))
        held_before = bounded_mailbox.unrequested_bytes
        self.fill(bounded_mailbox, 3, step=1)
        bounded_mailbox.put_message({"kind": "SESSION"}, size=1000)
        assert bounded_mailbox.accepts_data and bounded_mailbox.unrequested_bytes == held_before

    @pytest.mark.parametrize("kind", ["control", "round"])
    def test_unrequested_values_without_a_step_are_bounded(self, bounded_mailbox: Mailbox, kind: str) -> None:
        """A correct sender is blocked long before; one that continues during another wait violates the plan."""
        large = np.zeros(1 << 20, np.uint8)
        with pytest.raises(RemoteProtocolError, match="that were not requested"):
            for slot in range(64):
                bounded_mailbox.put(replace_kind(make_key(slot), kind), large)
        assert bounded_mailbox.unrequested_bytes < 32 << 20

    def test_tensors_beyond_the_due_bytes_block_the_sender_during_a_wait(self, bounded_mailbox: Mailbox) -> None:
        due = {0: self.SIZE, 1: 0}
        bounded_mailbox._due_bytes = lambda key: due[key.step]
        with bounded_mailbox._waiters.enter_wait():
            self.fill(bounded_mailbox, 4)
            ahead = self.fill(bounded_mailbox, 2, step=1)
            assert bounded_mailbox.accepts_data
            bounded_mailbox.put(make_key(9, step=1), np.zeros(self.SIZE, np.uint8))
            assert not bounded_mailbox.accepts_data
            due[1] = self.SIZE  # the step begins
            assert bounded_mailbox.accepts_data
            due[1] = 0
            bounded_mailbox.announce_receive(ahead[0])
            assert bounded_mailbox.accepts_data

    def test_unrequested_tensors_of_past_steps_are_dropped(self, bounded_mailbox: Mailbox) -> None:
        for step in range(20):
            self.fill(bounded_mailbox, 2, step)
            bounded_mailbox.take(make_key(0, step), 0.0)
        assert bounded_mailbox.unrequested_bytes == count_held_bytes(self.SIZE)

    def test_unread_messages_are_bounded(self, bounded_mailbox: Mailbox) -> None:
        """One large message is accepted besides small ones: different programs are compared line by line."""
        bounded_mailbox.put_message({"kind": "SESSION"}, size=100)
        bounded_mailbox.put_message({"kind": "SESSION"}, size=4 << 20)
        with pytest.raises(
            RemoteProtocolError, match=r"received a message of 100 bytes while 4\d{6} bytes of messages are unread"
        ):
            bounded_mailbox.put_message({"kind": "LEAVING"}, size=100)
        bounded_mailbox.take_message("SESSION", 0.0)
        bounded_mailbox.take_message("SESSION", 0.0)
        with pytest.raises(RemoteProtocolError, match="more than 64 unread messages SESSION"):
            for _ in range(100):
                bounded_mailbox.put_message({"kind": "SESSION"})

    @given(st.lists(st.tuples(st.sampled_from(["put", "take", "announce"]), st.integers(0, 5), st.integers(0, 9000))))
    def test_held_bytes_match_the_unrequested_tensors(self, moves: list[tuple[str, int, int]]) -> None:
        mailbox = Mailbox("gpu/0", "npu/0", window=10_000, clock=FakeClock())
        sizes: dict[Key, int] = {}
        requested_keys: set[Key] = set()
        taken_keys: set[Key] = set()
        for move, slot, size in moves:
            each = replace_kind(make_key(slot), "control" if slot % 2 else "forward")
            if move == "put" and each not in sizes.keys() | taken_keys:
                mailbox.put(each, np.zeros(size, np.uint8))
                sizes[each] = size
            elif move == "take" and each in sizes:
                mailbox.take(each, 0.0)
                taken_keys.add(each)
                del sizes[each]
            elif move == "announce" and each not in taken_keys:
                mailbox.announce_receive(each)
                requested_keys.add(each)
            assert mailbox.unrequested_bytes == sum(
                count_held_bytes(size) for each, size in sizes.items() if each not in requested_keys
            )
            assert mailbox.accepts_data == (mailbox.unrequested_bytes <= 10_000)


SMALL = np.zeros(1, np.uint8)


def replace_kind(one: Key, kind: str) -> Key:
    return dataclasses.replace(one, kind=kind)
