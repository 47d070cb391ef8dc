"""Replicas run parts of one list, so they never deadlock, whatever their numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.ir.routing import Routing, Seat, enough, order_by_speed
from whale_nebula.schedule.lines import Work, uniform
from whale_nebula.schedule.schedules import SCHEDULES, limits
from whale_nebula.schedule.simulate import draw, simulate


def test_one_feeds_eight_as_fast_as_it_can() -> None:
    """Where a discriminator takes eight times as long as the generator, eight of them keep it busy."""
    alone = simulate([Work(1.0, 1.0), Work(8.0, 8.0)], uniform(2), 64)
    eight = simulate([Work(1.0, 1.0), Work(8.0, 8.0, replicas=8)], uniform(2), 64)
    assert alone.seconds / eight.seconds > 6.5
    assert eight.busy(0) / eight.seconds > 0.8


def test_each_replica_has_a_row() -> None:
    works = [Work(1.0, 2.0), Work(1.0, 2.0, replicas=2)]
    assert draw(simulate(works, uniform(2), 4)).splitlines() == [
        "stage 0   |F0-F1-F2-F3-B0====B1====B2====B3====|",
        "stage 1.0 |...F0-B0====F2-B2====...............|",
        "stage 1.1 |......F1-B1====F3-B3====............|",
    ]


def test_where_a_process_has_several_replicas_it_takes_the_turns_of_all() -> None:
    routing = Routing((("a/0", "a/1", "a/0"), ("b/0",)))
    assert routing.turns(0, "a/0", 6) == (0, 2, 3, 5)
    assert routing.seats(0, "a/0") == {Seat(0, 0): (0, 2)}
    assert routing.pairs(0, (1,), 6) == (("a/0", "b/0"), ("a/1", "b/0"))


def test_in_one_process_each_replica_has_a_seat() -> None:
    routing = Routing((("a", "a"), ("b",)))
    assert routing.seats(0, "a") == {Seat(0, 0): (0,), Seat(0, 1): (1,)}
    assert not routing.replicated and routing.pairs(0, (1,), 2) == (("a", "b"),)


@given(
    orders=st.lists(st.permutations([0, 0, 1, 1, 1, 2]), min_size=1, max_size=4),
    micro_batches=st.integers(1, 14),
    name=st.sampled_from(sorted(SCHEDULES)),
    seconds=st.sampled_from([0.0, 0.5, 4.0]),
    in_flight=st.sampled_from([None, 1, 3]),
)
def test_every_schedule_comes_to_its_end_in_whatever_order_replicas_take_turns(
    orders: list[list[int]], micro_batches: int, name: str, seconds: float, in_flight: int | None
) -> None:
    works = [Work(1.0, 2.0, replicas=3, order=tuple(order), slowness=(1.0, 3.0, 0.5)) for order in orders]
    found = simulate(works, uniform(len(works), seconds=seconds), micro_batches, name=name, in_flight=in_flight)
    for stage, order in enumerate(orders):
        done = sorted((span.micro_batch, span.what) for span in found.of(stage))
        assert done == sorted((m, what) for m in range(micro_batches) for what in "FB")
        assert all(span.replica == order[span.micro_batch % 6] for span in found.of(stage))


@pytest.mark.parametrize("speeds", [(1.0, 2.0), (1.0, 3.0), (1.0, 1.0, 4.0), (2.0, 3.0, 5.0)])
def test_with_shares_by_speed_a_stage_is_done_as_soon_as_it_can_be(speeds: tuple[float, ...]) -> None:
    many = enough([speeds], len(speeds))
    order, slowness = order_by_speed(speeds, many), tuple(1.0 / speed for speed in speeds)
    shared = simulate([Work(0.0, 1.0, replicas=len(speeds), order=order, slowness=slowness)], {}, many)
    in_turn = simulate([Work(0.0, 1.0, replicas=len(speeds), slowness=slowness)], {}, many)
    assert shared.seconds <= 1.05 * many / sum(speeds) < in_turn.seconds


@pytest.mark.parametrize("speeds", [(1.0, 2.0), (1.0, 8.0), (1.0, 1.0, 4.0)])
def test_a_pipeline_of_uneven_replicas_is_as_fast_as_if_all_were_in_flight(speeds: tuple[float, ...]) -> None:
    """The slow one has its own in flight while the fast one does many; else each would wait for its other half."""
    many = int(8 * sum(speeds))
    slowness = tuple(max(speeds) / speed for speed in speeds)
    works = [Work(1.0, 2.0, replicas=len(speeds), order=order_by_speed(speeds, many), slowness=slowness)] * 2
    assert simulate(works, uniform(2), many).seconds == simulate(works, uniform(2), many, name="gpipe").seconds


@given(order=st.permutations([0, 0, 0, 0, 1]), chosen=st.integers(1, 6), many=st.integers(5, 30))
def test_nobody_holds_more_than_the_user_allows(order: list[int], chosen: int, many: int) -> None:
    (limit,) = limits("1f1b", 1, many, in_flight=chosen, replicas=[2], orders=[tuple(order)])
    assert limit * 4 / 5 <= chosen


def test_an_order_says_who_takes_what() -> None:
    routing = Routing((("a/0", "a/1"), ("b/0", "b/1")), ((), (1, 0, 1)))
    assert [routing.replica(1, m) for m in range(6)] == [1, 0, 1, 1, 0, 1]
    assert routing.turns(0, "a/0", 4) == (0, 2) and routing.turns(1, "b/0", 4) == (1,)
    assert routing.pairs(0, (1,), 3) == (("a/0", "b/1"), ("a/1", "b/0"))
    assert set(routing.pair_hosts(0, (1,))) == {(a, b) for a in ("a/0", "a/1") for b in ("b/0", "b/1")}
