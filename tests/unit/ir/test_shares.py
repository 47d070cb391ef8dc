"""Shares by speed, and the order of micro-batches by shares."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.ir.routing import (
    MAX_PER_REPLICA,
    TOLERANCE,
    choose_micro_batches,
    compute_excess,
    compute_share_times,
    compute_shares,
    count_turns,
    order_by_shares,
    order_by_speed,
)

SPEEDS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6)


@given(speeds=SPEEDS, count=st.integers(1, 40))
def test_shares_add_up_and_leave_no_replica_idle(speeds: list[float], count: int) -> None:
    found = compute_shares(speeds, count)
    assert sum(found) == count
    assert min(found) >= (count >= len(speeds))


@given(speeds=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=3), count=st.integers(3, 9))
def test_shares_minimize_the_longest_time(speeds: list[float], count: int) -> None:
    best = max(compute_share_times(compute_shares(speeds, count), speeds))
    others = (each for each in product(range(1, count + 1), repeat=len(speeds)) if sum(each) == count)
    assert all(max(compute_share_times(other, speeds)) >= best for other in others)


@given(speeds=SPEEDS, times=st.integers(1, 4), count=st.integers(6, 30))
def test_shares_depend_only_on_ratios_of_speeds(speeds: list[float], times: int, count: int) -> None:
    assert compute_shares([2.0**times * speed for speed in speeds], count) == compute_shares(speeds, count)


@given(given_shares=st.lists(st.integers(1, 9), min_size=1, max_size=6), rounds=st.integers(1, 3))
def test_order_gives_each_replica_its_share_per_period(given_shares: list[int], rounds: int) -> None:
    count = sum(given_shares)
    found = order_by_shares(given_shares)
    assert count_turns(found, len(given_shares), rounds * count) == tuple(rounds * share for share in given_shares)


@given(given_shares=st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_order_spreads_shares_evenly(given_shares: list[int]) -> None:
    """At each position, the count of a replica differs from its share by less than the number of other replicas."""
    found, whole = order_by_shares(given_shares), sum(given_shares)
    for upto in range(1, len(found) + 1):
        for replica, share in enumerate(given_shares):
            had = found[:upto].count(replica)
            assert abs(had - upto * share / whole) < len(given_shares) - 1 + 1e-9


@given(st.integers(1, 6), st.integers(1, 30))
def test_replicas_of_equal_speed_take_turns(replicas: int, count: int) -> None:
    assert order_by_speed([3.0] * replicas, count) == ()
    assert count_turns((), replicas, count) == tuple(len(range(r, count, replicas)) for r in range(replicas))


@given(st.lists(SPEEDS, max_size=3), st.integers(1, 6))
def test_enough_chooses_the_fewest_sufficient_micro_batches(stages: list[list[float]], least: int) -> None:
    found = choose_micro_batches(stages, least)
    uneven = [speeds for speeds in stages if len(set(speeds)) > 1]
    most = max([least, *(MAX_PER_REPLICA * len(speeds) for speeds in uneven)])
    assert max([least, *map(len, uneven)]) <= found <= most
    worst = max((compute_excess(speeds, found) for speeds in uneven), default=1.0)
    fewer = range(max([least, *map(len, uneven)]), found)
    assert all(max(compute_excess(speeds, count) for speeds in uneven) > min(worst, TOLERANCE) for count in fewer)


def test_enough_realizes_exact_ratios() -> None:
    assert [choose_micro_batches([[1.0, ratio]]) for ratio in (2, 3, 4, 8)] == [3, 4, 5, 9]
    assert choose_micro_batches([[1.0, 1.04]]) == 2
