"""Pacing to a rate: long runs, idle lines, small frames, flows that share a line, many threads."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.gateway.route import _FREE_BURST, FREE_BYTES, FairQueue, Pacer, QueuedFrame

MIB = 1 << 20
RATE = 7.5e6
TIMEOUT_SECONDS = 20.0


class Clock:
    """Time that passes when the thread that keeps it waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        if seconds is None:
            assert condition.wait(TIMEOUT_SECONDS)
        else:
            self.now += seconds


def make_pacer(rate: float | None = RATE) -> tuple[Pacer, Clock]:
    clock = Clock()
    return Pacer(rate, now=lambda: clock.now, wait=clock.wait), clock


@pytest.mark.parametrize("size", [FREE_BYTES // 4, FREE_BYTES + 1, 60 << 10, MIB, 8 * MIB])
def test_long_transfer_keeps_to_the_rate_including_overhead(size: int) -> None:
    """Frames of every size: what is small is not sent past the rate, either."""
    pacer, clock = make_pacer()
    count = min(50 * MIB // size, 20_000)
    for _ in range(count):
        pacer.wait_turn(size)
    carried = 1.04 * (count - 1) * size / RATE
    assert 0.99 * carried - 1.04 * _FREE_BURST / RATE - 0.02 < clock.now < 1.01 * carried


def test_frame_on_an_idle_line_does_not_wait() -> None:
    pacer, clock = make_pacer()
    pacer.wait_turn(MIB)
    assert clock.now == 0.0
    clock.now = 10.0
    pacer.wait_turn(MIB)
    assert clock.now == 10.0


def test_idle_time_is_not_accumulated() -> None:
    pacer, clock = make_pacer()
    clock.now = 1000.0
    for _ in range(11):
        pacer.wait_turn(MIB)
    assert clock.now - 1000.0 > 9.9 * MIB / RATE


def test_acknowledgement_on_a_busy_line_is_counted_without_waiting() -> None:
    pacer, clock = make_pacer()
    pacer.wait_turn(8 * MIB)
    for _ in range(100):
        pacer.wait_turn(128)
    assert clock.now == 0.0
    pacer.wait_turn(MIB)
    assert clock.now == pytest.approx(1.04 * (8 * MIB + 100 * 128) / RATE - 0.02)


def test_small_frames_do_not_delay_another_flow() -> None:
    """However many small frames one flow has sent, the next one of another flow is near."""
    pacer, clock = make_pacer()
    for _ in range(5000):
        pacer.wait_turn(60 << 10, ("small",))
    before = clock.now
    pacer.wait_turn(MIB, ("large",))
    assert clock.now - before < 0.05


@given(st.lists(st.lists(st.integers(1, 2 * MIB), min_size=1, max_size=5), min_size=2, max_size=5))
def test_backlogged_flows_get_equal_shares_of_bytes(flows: list[list[int]]) -> None:
    """Each flow repeats its sizes for ever; none is ahead of another by more than two frames."""
    queue, condition, sent = FairQueue(), threading.Condition(), [0] * len(flows)
    sizes = [itertools.cycle(each) for each in flows]
    flow_by_turn: dict[int, int] = {}

    def add(flow: int) -> None:
        frame = QueuedFrame(next(sizes[flow]), condition)
        flow_by_turn[id(frame)] = flow
        queued.append(frame)
        queue.add((flow,), frame)

    queued: list[QueuedFrame] = []
    for flow in range(len(flows)):
        add(flow)
        add(flow)
    for _ in range(200):
        frame = queue.pop()
        flow = flow_by_turn[id(frame)]
        sent[flow] += frame.size
        add(flow)
        largest = max(max(each) for each in flows)
        assert max(sent) - min(sent) <= 2 * largest


def test_accounts_share_a_line_equally_for_any_number_of_pairs() -> None:
    """Ana has one pair, Bob's run has sixteen, and so has a run of Cleo's at the same gateway."""
    queue, condition, sent = FairQueue(), threading.Condition(), dict.fromkeys(("ana", "bob", "cleo"), 0)
    flows = [("mt", "ana", 0), *(("mt", "bob", n) for n in range(16)), *(("other", "cleo", n) for n in range(16))]
    waiting: list[tuple[QueuedFrame, tuple[str, str, int]]] = []

    def add(flow: tuple[str, str, int]) -> None:
        waiting.append((QueuedFrame(MIB, condition), flow))
        queue.add(flow, waiting[-1][0])

    for flow in (*flows, *flows):
        add(flow)
    shares: dict[tuple[str, str, int], int] = dict.fromkeys(flows, 0)
    for _ in range(640):
        frame = queue.pop()
        found = next(each for each in waiting if each[0] is frame)
        waiting.remove(found)
        sent[found[1][1]] += 1
        shares[found[1]] += 1
        add(found[1])
    assert sent == {"ana": 160, "bob": 160, "cleo": 320}  # runs have the same, and in a run its accounts
    assert {count for flow, count in shares.items() if flow[1] != "ana"} == {10, 20}


def test_threads_of_two_flows_share_a_line() -> None:
    pacer, clock = make_pacer()
    done: dict[str, float] = {}

    def send(flow: str, size: int, count: int) -> None:
        for _ in range(count):
            pacer.wait_turn(size, (flow,))
        done[flow] = clock.now

    threads = [threading.Thread(target=send, args=("large", MIB, 25)) for _ in range(2)]
    threads += [threading.Thread(target=send, args=("small", 50_000, 500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    whole = 1.04 * (50 * MIB + 2000 * 50_000) / RATE
    assert 0.97 < clock.now / whole < 1.01
