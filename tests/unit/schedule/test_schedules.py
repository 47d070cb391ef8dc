"""Limits of micro-batches in flight by stage, and names of schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError
from whale_nebula.ir.routing import Routing, Seat, choose_micro_batches, order_by_speed
from whale_nebula.schedule.lines import Work, compute_pace, make_uniform_hops
from whale_nebula.schedule.schedules import (
    SCHEDULES,
    SPLIT_BACKWARD,
    Backward,
    BackwardWeights,
    Forward,
    Fused,
    Pace,
    choose_delays,
    find_limit,
    limits,
    list_instructions,
    to_text,
)
from whale_nebula.schedule.simulate import draw_timeline, simulate


def uniform_pace(stages: int, compute: float, seconds: float, delay: float = 0.0) -> Pace:
    return Pace(compute, (2 * (seconds + delay),) * (stages - 1), seconds)


@pytest.mark.parametrize(("wrong", "meant"), [("1F1B", "1f1b"), ("g-pipe", "gpipe"), ("eager_1f1b", "eager-1f1b")])
def test_unknown_schedule_suggests_a_similar_name(wrong: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"unknown schedule '{wrong}'") as caught:
        find_limit(wrong)
    assert caught.value.mend == f"did you mean {meant!r}?"


def test_unknown_schedule_without_a_similar_name_lists_all() -> None:
    with pytest.raises(OptionError) as caught:
        limits("zero", 2, 4)
    assert all(name in caught.value.mend for name in SCHEDULES)


@pytest.mark.parametrize(
    ("stages", "seconds", "delay", "expected"),
    [
        (2, 0.0, 0.0, (2, 1)),  # free links: 1F1B
        (2, 1.5, 0.0, (3, 1)),
        (2, 0.0, 6.0, (6, 1)),
        (2, 3.0, 0.0, (4, 1)),
        (4, 1.5, 0.0, (7, 5, 3, 1)),  # 2·t_c = c: 2·(p − s) − 1
        (3, 0.1, 0.0, (5, 3, 1)),  # rounded up at each hop
        (2, 6.0, 0.0, (4, 1)),  # the line sets the period: more could not leave
    ],
)
def test_eager_limits_cover_the_round_trip(
    stages: int, seconds: float, delay: float, expected: tuple[int, ...]
) -> None:
    assert limits("eager-1f1b", stages, 16, pace=uniform_pace(stages, 3.0, seconds, delay)) == expected


@given(st.integers(1, 6), st.floats(0.1, 9.0), st.floats(0.0, 1.0), st.floats(0.0, 9.0))
def test_eager_limits_match_the_formula_for_fast_links(stages: int, compute: float, part: float, delay: float) -> None:
    seconds = part * compute
    expected = [
        stages - s + (stages - 1 - s) * math.ceil(2 * (seconds + delay) / compute - 1e-9) for s in range(stages)
    ]
    assert list(limits("eager-1f1b", stages, 10_000, pace=uniform_pace(stages, compute, seconds, delay))) == expected


def test_eager_limits_tolerate_floating_point_rounding() -> None:
    assert (0.1 + 0.2) / 0.1 > 3.0
    assert limits("eager-1f1b", 2, 16, pace=Pace(0.1, (0.2,))) == (4, 1)


def test_eager_limit_is_the_batch_for_stages_of_zero_seconds() -> None:
    assert limits("eager-1f1b", 2, 16, pace=Pace(0.0, (1.0,))) == (16, 16)


def test_hop_inside_a_cluster_adds_one_to_the_eager_limit() -> None:
    assert limits("eager-1f1b", 3, 16, pace=Pace(3.0, (0.0, 6.0))) == (5, 4, 1)
    assert limits("eager-1f1b", 3, 16, pace=Pace(3.0, (6.0, 0.0))) == (5, 2, 1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_in_flight_replaces_the_limits_of_the_schedule(name: str) -> None:
    assert limits(name, 3, 8, pace=uniform_pace(3, 3.0, 9.0), in_flight=2) == (2, 2, 2)
    assert limits(name, 3, 8, in_flight=50) == (8, 8, 8)
    assert limits(name, 3, 8, in_flight=(3, 5, 2)) == (3, 3, 2)


@pytest.mark.parametrize("in_flight", [0, -1, "2", 1.5, [2, 0], True])
def test_invalid_in_flight_is_refused(in_flight: int) -> None:
    with pytest.raises(OptionError, match="in_flight="):
        limits("1f1b", 2, 8, in_flight=in_flight)


def test_in_flight_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(OptionError, match="2 limits, but there are 3 stages"):
        limits("1f1b", 3, 8, in_flight=[2, 1])


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 40),
    st.floats(0.0, 9.0),
    st.floats(0.0, 9.0),
)
def test_limits_descend_and_stay_within_the_batch(
    name: str, stages: int, micro_batches: int, seconds: float, delay: float
) -> None:
    measured = compute_pace([Work(1.0, 2.0)] * stages, make_uniform_hops(stages, seconds=seconds, delay=delay))
    made = limits(name, stages, micro_batches, pace=measured)
    assert len(made) == stages
    assert list(made) == sorted(made, reverse=True)
    assert 1 <= made[-1] <= made[0] <= micro_batches


# -------------------- The instruction lists: literally, and their invariants
GOLDEN = Path(__file__).parents[2] / "golden" / "schedules.txt"
names = st.sampled_from(sorted(SCHEDULES))


def list_all_instructions() -> Iterator[str]:
    """List the instructions of all schedules for up to four stages and six micro-batches, as in the golden file."""
    for name, limit in SCHEDULES.items():
        for stages in range(1, 5):
            for micro_batches in range(1, 7):
                chosen = [limit(stage, stages, micro_batches) for stage in range(stages)]
                later = choose_delays(chosen, micro_batches, [stage == stages - 1 for stage in range(stages)])
                for stage in range(stages):
                    delay = later[stage] if name in SPLIT_BACKWARD else None
                    text = to_text(list_instructions(stage, stages, micro_batches, chosen[stage], delay=delay))
                    yield f"{name} p={stages} m={micro_batches} s={stage}: {text}"


def test_instruction_lists_match_the_golden_file() -> None:
    assert list(list_all_instructions()) == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize("stage", [0, 2])
def test_instructions_without_a_backward_are_forwards(stage: int) -> None:
    assert to_text(list_instructions(stage, 3, 3, 1, backward=False)) == "F0 F1 F2"


def test_fused_option_overrides_the_default_of_a_stage() -> None:
    assert to_text(list_instructions(1, 2, 3, 1, fused=False)) == "F0 B0 F1 B1 F2 B2"
    assert to_text(list_instructions(0, 2, 3, 2, fused=True)) == "FB0 FB1 FB2"


def test_instructions_have_their_phase() -> None:
    assert to_text(list_instructions(0, 2, 2, 2, phase=1)) == "1:F0 1:F1 1:B0 1:B1"
    assert to_text(list_instructions(1, 2, 2, 1, phase=1)) == "1:FB0 1:FB1"
    assert to_text(list_instructions(1, 2, 2, 1, phase=1, backward=False)) == "1:F0 1:F1"


def test_instructions_of_different_kinds_are_unequal() -> None:
    assert len({Forward(1), Backward(1), Fused(1), BackwardWeights(1), Forward(1, phase=1)}) == 5


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        ((0, 1), "micro_batch"),
        ((True, 1), "micro_batch"),
        ((4, 0), "in_flight"),
        ((4, "4"), "in_flight"),
        ((2.5, 1), "micro_batch"),
    ],
)
def test_invalid_counts_are_refused_before_iteration(counts: tuple[int, int], word: str) -> None:
    with pytest.raises(OptionError, match=f"{word}="):
        list_instructions(0, 2, *counts)


@given(names, st.integers(1, 6), st.integers(1, 30), st.none() | st.integers(1, 40), st.data())
def test_instructions_run_each_micro_batch_once_in_order(
    name: str, stages: int, micro_batches: int, in_flight: int | None, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    limit = find_limit(name)(stage, stages, micro_batches) if in_flight is None else in_flight
    made = list(list_instructions(stage, stages, micro_batches, limit))
    for letter in "FB":
        assert [i.micro_batch for i in made if letter in i.letters] == list(range(micro_batches))
    for micro_batch in range(micro_batches):
        if stage < stages - 1:
            assert made.index(Forward(micro_batch)) < made.index(Backward(micro_batch))
    assert (stage == stages - 1) == any(isinstance(i, Fused) for i in made)


@given(names, st.integers(2, 6), st.integers(1, 30), st.none() | st.integers(1, 40), st.data())
def test_micro_batches_in_flight_reach_and_respect_the_limit(
    name: str, stages: int, micro_batches: int, in_flight: int | None, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 2))
    limit = find_limit(name)(stage, stages, micro_batches) if in_flight is None else in_flight
    held, most = 0, 0
    for instruction in list_instructions(stage, stages, micro_batches, limit):
        held += 1 if isinstance(instruction, Forward) else -1
        most = max(most, held)
    assert held == 0
    assert most == min(limit, micro_batches)


@given(
    st.integers(1, 6),
    st.integers(1, 30),
    st.none() | st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=6),
    st.data(),
)
def test_zero_bubble_keeps_order_and_memory_limits(
    stages: int, micro_batches: int, in_flight: int | list[int] | None, data: st.DataObject
) -> None:
    given_limits = in_flight[:stages] if isinstance(in_flight, list) else in_flight
    chosen = limits("zero-bubble", stages, micro_batches, in_flight=given_limits)
    stage = data.draw(st.integers(0, stages - 1))
    fused = [each == stages - 1 for each in range(stages)]
    delay = choose_delays(chosen, micro_batches, fused, in_flight=given_limits)[stage]
    made = list(list_instructions(stage, stages, micro_batches, chosen[stage], delay=delay))
    for letter in "FBW":
        assert [each.micro_batch for each in made if letter in each.letters] == list(range(micro_batches))
    held, most = 0, 0
    for instruction in made:
        held += ("F" in instruction.letters) - (instruction.letters == "W")
        most = max(most, held)
    assert most <= (chosen[stage] if isinstance(in_flight, list) else chosen[0])
    assert [each for each in made if each.letters != "W"] == list(
        list_instructions(stage, stages, micro_batches, chosen[stage])
    )


# -------------------- Replicas run parts of one list, so they never deadlock
def test_eight_replicas_keep_one_generator_busy() -> None:
    """Eight replicas of a discriminator keep a generator busy that is eight times as fast."""
    alone = simulate([Work(1.0, 1.0), Work(8.0, 8.0)], make_uniform_hops(2), 64)
    eight = simulate([Work(1.0, 1.0), Work(8.0, 8.0, replicas=8)], make_uniform_hops(2), 64)
    assert alone.seconds / eight.seconds > 6.5
    assert eight.busy(0) / eight.seconds > 0.8


def test_drawing_has_a_row_per_replica() -> None:
    works = [Work(1.0, 2.0), Work(1.0, 2.0, replicas=2)]
    assert draw_timeline(simulate(works, make_uniform_hops(2), 4)).splitlines() == [
        "stage 0   |F0-F1-F2-F3-B0====B1====B2====B3====|",
        "stage 1.0 |...F0-B0====F2-B2====...............|",
        "stage 1.1 |......F1-B1====F3-B3====............|",
    ]


def test_process_with_several_replicas_takes_all_their_turns() -> None:
    routing = Routing((("a/0", "a/1", "a/0"), ("b/0",)))
    assert routing.turns(0, "a/0", 6) == (0, 2, 3, 5)
    assert routing.seats(0, "a/0") == {Seat(0, 0): (0, 2)}
    assert routing.pairs(0, (1,), 6) == (("a/0", "b/0"), ("a/1", "b/0"))


def test_single_process_has_a_seat_per_replica() -> None:
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
def test_schedules_finish_for_any_order_of_replicas(
    orders: list[list[int]], micro_batches: int, name: str, seconds: float, in_flight: int | None
) -> None:
    works = [Work(1.0, 2.0, replicas=3, order=tuple(order), slowness=(1.0, 3.0, 0.5)) for order in orders]
    found = simulate(
        works, make_uniform_hops(len(works), seconds=seconds), micro_batches, name=name, in_flight=in_flight
    )
    for stage, order in enumerate(orders):
        done = sorted((span.micro_batch, span.what) for span in found.spans_of(stage))
        assert done == sorted((m, what) for m in range(micro_batches) for what in "FB")
        assert all(span.replica == order[span.micro_batch % 6] for span in found.spans_of(stage))


@pytest.mark.parametrize("speeds", [(1.0, 2.0), (1.0, 3.0), (1.0, 1.0, 4.0), (2.0, 3.0, 5.0)])
def test_shares_by_speed_are_nearly_optimal(speeds: tuple[float, ...]) -> None:
    many = choose_micro_batches([speeds], len(speeds))
    order, slowness = order_by_speed(speeds, many), tuple(1.0 / speed for speed in speeds)
    shared = simulate([Work(0.0, 1.0, replicas=len(speeds), order=order, slowness=slowness)], {}, many)
    in_turn = simulate([Work(0.0, 1.0, replicas=len(speeds), slowness=slowness)], {}, many)
    assert shared.seconds <= 1.05 * many / sum(speeds) < in_turn.seconds


@pytest.mark.parametrize("speeds", [(1.0, 2.0), (1.0, 8.0), (1.0, 1.0, 4.0)])
def test_pipeline_of_uneven_replicas_is_as_fast_as_gpipe(speeds: tuple[float, ...]) -> None:
    """The slow replica has a micro-batch in flight while the fast one computes many."""
    many = int(8 * sum(speeds))
    slowness = tuple(max(speeds) / speed for speed in speeds)
    works = [Work(1.0, 2.0, replicas=len(speeds), order=order_by_speed(speeds, many), slowness=slowness)] * 2
    assert (
        simulate(works, make_uniform_hops(2), many).seconds
        == simulate(works, make_uniform_hops(2), many, name="gpipe").seconds
    )


@given(order=st.permutations([0, 0, 0, 0, 1]), chosen=st.integers(1, 6), many=st.integers(5, 30))
def test_replicas_respect_in_flight(order: list[int], chosen: int, many: int) -> None:
    (limit,) = limits("1f1b", 1, many, in_flight=chosen, replicas=[2], orders=[tuple(order)])
    assert limit * 4 / 5 <= chosen


def test_routing_follows_the_orders_of_stages() -> None:
    routing = Routing((("a/0", "a/1"), ("b/0", "b/1")), ((), (1, 0, 1)))
    assert [routing.replica(1, m) for m in range(6)] == [1, 0, 1, 1, 0, 1]
    assert routing.turns(0, "a/0", 4) == (0, 2) and routing.turns(1, "b/0", 4) == (1,)
    assert routing.pairs(0, (1,), 3) == (("a/0", "b/1"), ("a/1", "b/0"))
    assert set(routing.pair_hosts(0, (1,))) == {(a, b) for a in ("a/0", "a/1") for b in ("b/0", "b/1")}
