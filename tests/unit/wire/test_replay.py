"""The replay buffer until acknowledgement, and the order of arrivals."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.buffers import Arrivals, Packet, Replay, held_bytes


def packet(number: int, size: int = 10) -> Packet:
    return bytes([number]), np.full(size, number, np.uint8)


def filled(count: int, budget: int = 5000) -> Replay:
    replay = Replay(budget)
    for number in range(1, count + 1):
        replay.keep(packet(number))
    return replay


def numbers(packets: list[Packet]) -> list[int]:
    return [head[0] for head, _ in packets]


def test_the_very_bytes_are_kept_without_a_copy() -> None:
    replay = Replay(100)
    head, chunk = packet(1)
    replay.keep((head, chunk))
    ((again, same),) = replay.since(1)
    assert again is head and same is chunk


def test_what_was_never_sent_is_not_acknowledged() -> None:
    replay = filled(3)
    with pytest.raises(RemoteProtocolError, match="frame 5 is asked for, and only 3 were sent"):
        replay.acknowledge(5)
    assert replay.bytes == 33


@pytest.mark.parametrize("number", [2, 5])
def test_what_is_not_kept_cannot_be_sent_again(number: int) -> None:
    replay = filled(3)
    replay.acknowledge(3)
    with pytest.raises(LocalProtocolError, match="is not kept"):
        replay.since(number)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40) | st.none(), max_size=60))
def test_bytes_and_numbers_always_fit(moves: list[int | None]) -> None:
    """None sends a frame, a number acknowledges so many of those that are out."""
    replay = Replay(100)
    for move in moves:
        if move is None:
            replay.keep(packet(replay.next % 256, size=replay.next % 7))
        else:
            replay.acknowledge(min(replay.oldest + move, replay.next))
        kept = replay.since(replay.oldest)
        assert replay.bytes == sum(len(head) + chunk.size for head, chunk in kept)
        assert numbers(kept) == [n % 256 for n in range(replay.oldest, replay.next)]
        assert replay.room == 100 - sum(held_bytes(len(head) + chunk.size) for head, chunk in kept)


def all_of(arrivals: Arrivals[int], numbers: list[int]) -> list[int]:
    """What is taken when frames come in this order."""
    taken = []
    for number in numbers:
        with pytest.raises(RemoteProtocolError, match="twice") if number in taken else contextlib.nullcontext():
            arrivals.add(number, number, 1)
        while (due := arrivals.due) is not None:
            taken.append(due)
            arrivals.advance()
    return taken


@settings(deadline=None)
@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 8), max_size=10))
def test_each_is_taken_once_and_in_order(order: list[int], again: list[int]) -> None:
    arrivals = Arrivals[int](1 << 20)
    assert all_of(arrivals, [*order, *again]) == list(range(1, 9))
    assert arrivals.expected == 9


def test_without_a_window_a_gap_is_refused() -> None:
    arrivals = Arrivals[int]()
    assert all_of(arrivals, [1, 1, 2]) == [1, 2]
    with pytest.raises(RemoteProtocolError, match="frame 4 came where frame 3 was due"):
        arrivals.add(4, 4, 1)


def test_only_so_many_bytes_are_held_and_their_room_comes_back() -> None:
    arrivals = Arrivals[int](2000)
    arrivals.add(2, 2, 800)
    with pytest.raises(RemoteProtocolError, match="no more than 2000 bytes"):
        arrivals.add(3, 3, 800)
    assert all_of(arrivals, [1]) == [1, 2]
    arrivals.add(4, 4, 800)


def test_a_number_far_ahead_is_refused_whatever_the_window() -> None:
    with pytest.raises(RemoteProtocolError):
        Arrivals[int](1 << 40).add(1 << 32, 0, 1)
