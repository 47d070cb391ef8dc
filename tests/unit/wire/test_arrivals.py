"""The order of what comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.replay import Arrivals, Turn


def all_of(arrivals: Arrivals[int], numbers: list[int]) -> list[int]:
    """What is taken when frames come in this order."""
    taken = []
    for number in numbers:
        turn = arrivals.turn(number)
        if turn is Turn.EARLY:
            arrivals.hold(number, number, 1)
        following = number if turn is Turn.DUE else None
        while following is not None:
            taken.append(following)
            following = arrivals.advance()
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
        arrivals.hold(4, 4, 1)


def test_only_so_many_bytes_are_held_and_their_room_comes_back() -> None:
    arrivals = Arrivals[int](2000)
    arrivals.hold(2, 2, 800)
    with pytest.raises(RemoteProtocolError, match="no more than 2000 bytes"):
        arrivals.hold(3, 3, 800)
    assert arrivals.advance() == 2
    assert arrivals.advance() is None
    arrivals.hold(4, 4, 800)


def test_a_number_far_ahead_is_refused_whatever_the_window() -> None:
    with pytest.raises(RemoteProtocolError):
        Arrivals[int](1 << 40).hold(1 << 32, 0, 1)
