"""The mailbox: by key in any order, each once, none late, and an end that all readers notice."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport.cable import FakeClock
from whale_nebula.errors import (
    DeadlineError,
    LinkClosedError,
    LocalProtocolError,
    RemoteFailureError,
    RemoteProtocolError,
)
from whale_nebula.transport.mailbox import Mailbox
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import held_bytes


def key(slot: int = 0, step: int = 0, program: int = 1) -> Key:
    return Key("forward", program, step, 0, -1, slot, "npu/0", "gpu/0")


@pytest.fixture
def clock() -> FakeClock:
    made = FakeClock()
    made.time = 100.0
    return made


@pytest.fixture
def mailbox(clock: FakeClock) -> Mailbox:
    return Mailbox("gpu/0", "npu/0", clock=clock)


def test_tensors_are_taken_in_any_order(mailbox: Mailbox, clock: FakeClock) -> None:
    for slot in range(3):
        mailbox.put(key(slot), f"tensor {slot}")
    assert [mailbox.take(key(slot), 1.0) for slot in (2, 0, 1)] == ["tensor 2", "tensor 0", "tensor 1"]
    assert clock.now() == 100.0


def test_what_is_on_its_way_is_waited_for(mailbox: Mailbox, clock: FakeClock) -> None:
    mailbox.put(key(), "tensor", due=103.5)
    assert mailbox.take(key(), 10.0) == "tensor"
    assert clock.now() == 103.5


def test_a_deadline_names_who_what_and_how_long(mailbox: Mailbox, clock: FakeClock) -> None:
    with pytest.raises(DeadlineError) as caught:
        mailbox.take(key(slot=7, step=3), 2.5)
    assert clock.now() == 102.5
    assert "'gpu/0' waited 2.5 s for worker 'npu/0'" in str(caught.value)
    assert "boundary 7 (step 3, phase 0) from npu/0 to gpu/0" in str(caught.value)


def test_a_message_has_a_deadline_too(mailbox: Mailbox) -> None:
    with pytest.raises(DeadlineError, match="message AGREE from npu/0"):
        mailbox.take_message("AGREE", 1.0)


def test_the_same_key_twice_is_an_error_taken_or_not(mailbox: Mailbox) -> None:
    mailbox.put(key(), 1)
    with pytest.raises(LocalProtocolError, match="was received twice"):
        mailbox.put(key(), 2)
    assert mailbox.take(key(), 1.0) == 1
    with pytest.raises(LocalProtocolError, match="was received twice"):
        mailbox.put(key(), 3)
    with pytest.raises(LocalProtocolError, match="already received"):
        mailbox.take(key(), 1.0)


def test_a_key_of_an_older_step_is_an_error_but_one_of_a_newer_step_is_not(mailbox: Mailbox) -> None:
    mailbox.put(key(0, step=5), "five")
    mailbox.put(key(0, step=4), "four, before anything of five was taken")
    mailbox.put(key(0, step=6), "six")
    mailbox.take(key(0, step=5), 1.0)
    with pytest.raises(LocalProtocolError, match="is late"):
        mailbox.put(key(1, step=4), "four")
    mailbox.put(key(0, step=4, program=2), "another program counts for itself")
    assert mailbox.take(key(0, step=4), 1.0).startswith("four")
    assert mailbox.take(key(0, step=6), 1.0) == "six"


def test_a_key_of_an_older_step_may_come_while_somebody_waits_for_it() -> None:
    mailbox = Mailbox("gpu/0", "npu/0")
    mailbox.put(key(0, step=5), "five")
    mailbox.take(key(0, step=5), 1.0)
    results = waiting(lambda: mailbox.take(key(9, step=4), 10.0))
    while key(9, step=4) not in mailbox._awaited:
        pass
    mailbox.put(key(9, step=4), "late, but wanted")
    assert results() == ["late, but wanted"]


def test_after_the_end_what_has_arrived_is_still_given_out(mailbox: Mailbox) -> None:
    mailbox.put(key(0), "there")
    mailbox.end(lambda: LinkClosedError("gone"))
    assert mailbox.take(key(0), 1.0) == "there"
    for attempt in (lambda: mailbox.take(key(1), 1.0), lambda: mailbox.take_message("A", 1.0), mailbox.check_open):
        with pytest.raises(LinkClosedError, match="gone"):
            attempt()


def test_what_is_on_its_way_when_the_end_is_due_still_comes(mailbox: Mailbox, clock: FakeClock) -> None:
    mailbox.put(key(), "there", due=101.0)
    mailbox.end(lambda: LinkClosedError("gone"), due=101.5)
    assert mailbox.take(key(), 5.0) == "there"
    with pytest.raises(LinkClosedError):
        mailbox.take(key(1), 5.0)
    assert clock.now() == 101.5


def test_a_failure_comes_before_everything_else_and_replaces_a_close(mailbox: Mailbox) -> None:
    mailbox.put(key(), "there")
    mailbox.end(lambda: LinkClosedError("gone"))
    mailbox.end(lambda: RemoteFailureError("failed"), at_once=True)
    mailbox.end(lambda: LinkClosedError("gone again"), at_once=True)
    with pytest.raises(RemoteFailureError, match="failed"):
        mailbox.take(key(), 1.0)


def test_a_failure_that_is_on_its_way_is_heard_when_it_arrives(mailbox: Mailbox, clock: FakeClock) -> None:
    mailbox.end(lambda: RemoteFailureError("failed"), due=102.0, at_once=True)
    mailbox.check_open()
    mailbox.put(key(), "sooner", due=101.0)
    assert mailbox.take(key(), 5.0) == "sooner"
    mailbox.put(key(1), "later", due=103.0)
    with pytest.raises(RemoteFailureError):
        mailbox.take(key(1), 5.0)
    assert clock.now() == 102.0


def test_closing_ends_it_for_its_owner_once(mailbox: Mailbox) -> None:
    mailbox.put(key(), "there")
    assert mailbox.close(lambda: LinkClosedError("closed here"))
    assert not mailbox.close(lambda: LinkClosedError("closed twice"))
    with pytest.raises(LinkClosedError, match="closed here"):
        mailbox.take(key(), 1.0)


def test_a_failure_that_was_heard_stays_the_reason_after_closing(mailbox: Mailbox) -> None:
    mailbox.end(lambda: RemoteFailureError("failed"), at_once=True)
    mailbox.close(lambda: LinkClosedError("closed here"))
    with pytest.raises(RemoteFailureError):
        mailbox.check_open()


def waiting(*attempts: Callable[[], object]) -> Callable[[], list[object]]:
    """Start each attempt in a thread; the call of what this gives waits for what they return or raise."""
    pool = ThreadPoolExecutor(len(attempts))
    futures = [pool.submit(attempt) for attempt in attempts]
    pool.shutdown(wait=False)
    return lambda: [future.exception(20.0) or future.result() for future in futures]


def test_the_end_wakes_everybody_with_an_error_of_his_own() -> None:
    mailbox = Mailbox("gpu/0", "npu/0")
    results = waiting(*(lambda slot=slot: mailbox.take(key(slot), 10.0) for slot in range(4)))
    mailbox.end(lambda: LinkClosedError("gone"))
    errors = results()
    assert all(isinstance(error, LinkClosedError) for error in errors)
    assert len({id(error) for error in errors}) == 4


def test_what_is_promised_may_come_after_later_steps(mailbox: Mailbox) -> None:
    mailbox.later(key(slot=7, step=0))
    mailbox.put(key(step=1), "of the next step")
    assert mailbox.take(key(step=1), 1.0) == "of the next step"
    mailbox.put(key(slot=7, step=0), "late")
    assert mailbox.take(key(slot=7, step=0), 1.0) == "late"


def test_what_was_promised_and_has_come_is_given_out_though_a_failure_followed(mailbox: Mailbox) -> None:
    mailbox.later(key(slot=7))
    mailbox.put(key(slot=7), "promised")
    mailbox.put(key(slot=8), "not promised")
    mailbox.end(lambda: RemoteFailureError("npu/0 failed"), at_once=True)
    assert mailbox.take(key(slot=7), 1.0) == "promised"
    with pytest.raises(RemoteFailureError):
        mailbox.take(key(slot=8), 1.0)


class TestWindow:
    """What lies in a mailbox unasked is counted, and says when its sender should be held."""

    SIZE = 4096

    @pytest.fixture
    def flowed(self) -> list[bool]:
        return []

    @pytest.fixture
    def bounded(self, clock: FakeClock, flowed: list[bool]) -> Mailbox:
        made = Mailbox("gpu/0", "npu/0", fault=RemoteProtocolError, clock=clock, window=2 * held_bytes(self.SIZE))
        made.on_flow = lambda: flowed.append(made.flows)
        return made

    def fill(self, mailbox: Mailbox, count: int, step: int = 0, kind: str = "forward") -> list[Key]:
        keys = [replaced(key(slot, step), kind) for slot in range(count)]
        for each in keys:
            mailbox.put(each, np.zeros(self.SIZE, np.uint8))
        return keys

    def test_it_flows_until_more_lies_there_than_the_window(self, bounded: Mailbox, flowed: list[bool]) -> None:
        first, *_ = self.fill(bounded, 2)
        assert bounded.flows
        self.fill(bounded, 3, step=1)
        assert not bounded.flows and flowed == []
        bounded.take(first, 0.0)
        assert not bounded.flows
        for slot in range(2):
            bounded.take(key(slot, 1), 0.0)
        assert bounded.flows and flowed == [True]

    def test_what_was_asked_for_does_not_count(self, bounded: Mailbox, flowed: list[bool]) -> None:
        for slot in range(3):
            bounded.later(key(slot))
        self.fill(bounded, 3)
        assert (bounded.held, bounded.flows) == (0, True)
        self.fill(bounded, 3, step=1)
        assert not bounded.flows
        bounded.later(key(0, 1))
        assert (bounded.held, flowed) == (2 * held_bytes(self.SIZE), [True])
        for slot in range(3):
            bounded.take(key(slot, 1), 0.0)
        assert bounded.held == 0

    def test_while_somebody_waits_for_what_has_not_come_all_flows(self, bounded: Mailbox, flowed: list[bool]) -> None:
        self.fill(bounded, 3)
        seen: list[bool] = []
        bounded._clock.wait = lambda condition, seconds: (seen.append(bounded.flows), bounded.put(key(9), SMALL))
        bounded.take(key(9), 1.0)
        assert (seen, flowed, bounded.flows) == ([True], [True], False)
        with pytest.raises(DeadlineError):
            bounded.take_message("SESSION", 0.0)  # who only looks does not wait
        assert flowed == [True]

    def test_messages_count_as_the_objects_that_they_are(self, bounded: Mailbox) -> None:
        bounded.put_message({"kind": "SESSION"}, size=1000)
        assert not bounded.flows
        bounded.take_message("SESSION", 0.0)
        assert (bounded.held, bounded.flows) == (0, True)

    def test_who_has_left_holds_nobody_and_keeps_nothing(self, bounded: Mailbox) -> None:
        self.fill(bounded, 3)
        bounded.close(lambda: LinkClosedError("closed"))
        held = bounded.held
        self.fill(bounded, 3, step=1)
        bounded.put_message({"kind": "SESSION"}, size=1000)
        assert bounded.flows and bounded.held == held

    @pytest.mark.parametrize("kind", ["control", "round"])
    def test_values_of_no_step_that_nobody_asks_for_are_bounded(self, bounded: Mailbox, kind: str) -> None:
        """A sender of ours is held long before; one that goes on while something else is awaited keeps to no plan."""
        large = np.zeros(1 << 20, np.uint8)
        with pytest.raises(RemoteProtocolError, match="that were not requested"):
            for slot in range(64):
                bounded.put(replaced(key(slot), kind), large)
        assert bounded.held < 32 << 20

    def test_more_than_is_due_holds_the_sender_though_somebody_waits(self, bounded: Mailbox) -> None:
        due = {0: self.SIZE, 1: 0}
        bounded._due = lambda key: due[key.step]
        with bounded._waiters.waiting():
            self.fill(bounded, 4)
            ahead = self.fill(bounded, 2, step=1)
            assert bounded.flows
            bounded.put(key(9, step=1), np.zeros(self.SIZE, np.uint8))
            assert not bounded.flows
            due[1] = self.SIZE  # the step begins
            assert bounded.flows
            due[1] = 0
            bounded.later(ahead[0])
            assert bounded.flows

    def test_what_nobody_asked_for_in_a_past_step_is_let_go(self, bounded: Mailbox) -> None:
        for step in range(20):
            self.fill(bounded, 2, step)
            bounded.take(key(0, step), 0.0)
        assert bounded.held == held_bytes(self.SIZE)

    def test_messages_are_few(self, bounded: Mailbox) -> None:
        """A large one is let in beside small ones: two programs that differ are told line by line."""
        bounded.put_message({"kind": "SESSION"}, size=100)
        bounded.put_message({"kind": "SESSION"}, size=4 << 20)
        with pytest.raises(
            RemoteProtocolError, match=r"4\d{6} bytes of unread messages, and 100 more bytes were received"
        ):
            bounded.put_message({"kind": "LEAVING"}, size=100)
        bounded.take_message("SESSION", 0.0)
        bounded.take_message("SESSION", 0.0)
        with pytest.raises(RemoteProtocolError, match="more than 64 unread messages SESSION"):
            for _ in range(100):
                bounded.put_message({"kind": "SESSION"})

    @given(st.lists(st.tuples(st.sampled_from(["put", "take", "later"]), st.integers(0, 5), st.integers(0, 9000))))
    def test_what_is_held_is_what_lies_there_unasked(self, moves: list[tuple[str, int, int]]) -> None:
        mailbox = Mailbox("gpu/0", "npu/0", window=10_000, clock=FakeClock())
        there: dict[Key, int] = {}
        asked: set[Key] = set()
        gone: set[Key] = set()
        for move, slot, size in moves:
            each = replaced(key(slot), "control" if slot % 2 else "forward")
            if move == "put" and each not in there.keys() | gone:
                mailbox.put(each, np.zeros(size, np.uint8))
                there[each] = size
            elif move == "take" and each in there:
                mailbox.take(each, 0.0)
                gone.add(each)
                del there[each]
            elif move == "later" and each not in gone:
                mailbox.later(each)
                asked.add(each)
            assert mailbox.held == sum(held_bytes(size) for each, size in there.items() if each not in asked)
            assert mailbox.flows == (mailbox.held <= 10_000)


SMALL = np.zeros(1, np.uint8)


def replaced(one: Key, kind: str) -> Key:
    return dataclasses.replace(one, kind=kind)
