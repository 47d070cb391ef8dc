"""Limits of micro-batches in flight by stage, and names of schedules."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError
from whale_nebula.schedule.lines import Work, pace, uniform
from whale_nebula.schedule.schedules import SCHEDULES, Pace, limit_of, limits


def alike(stages: int, compute: float, seconds: float, delay: float = 0.0) -> Pace:
    return Pace(compute, (2 * (seconds + delay),) * (stages - 1), seconds)


@pytest.mark.parametrize(("wrong", "meant"), [("1F1B", "1f1b"), ("g-pipe", "gpipe"), ("eager_1f1b", "eager-1f1b")])
def test_a_wrong_name_says_what_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"no schedule is called '{wrong}'") as caught:
        limit_of(wrong)
    assert caught.value.mend == f"did you mean {meant!r}?"


def test_a_name_like_none_of_them_lists_all() -> None:
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
def test_eager_covers_the_round_trip(stages: int, seconds: float, delay: float, expected: tuple[int, ...]) -> None:
    assert limits("eager-1f1b", stages, 16, pace=alike(stages, 3.0, seconds, delay)) == expected


@given(st.integers(1, 6), st.floats(0.1, 9.0), st.floats(0.0, 1.0), st.floats(0.0, 9.0))
def test_eager_is_the_formula_where_the_line_is_faster(stages: int, compute: float, part: float, delay: float) -> None:
    seconds = part * compute
    expected = [
        stages - s + (stages - 1 - s) * math.ceil(2 * (seconds + delay) / compute - 1e-9) for s in range(stages)
    ]
    assert list(limits("eager-1f1b", stages, 10_000, pace=alike(stages, compute, seconds, delay))) == expected


def test_eager_is_not_fooled_by_rounding() -> None:
    assert (0.1 + 0.2) / 0.1 > 3.0
    assert limits("eager-1f1b", 2, 16, pace=Pace(0.1, (0.2,))) == (4, 1)


def test_eager_with_stages_that_take_no_time_holds_the_batch() -> None:
    assert limits("eager-1f1b", 2, 16, pace=Pace(0.0, (1.0,))) == (16, 16)


def test_a_hop_inside_a_cluster_costs_one_only() -> None:
    assert limits("eager-1f1b", 3, 16, pace=Pace(3.0, (0.0, 6.0))) == (5, 4, 1)
    assert limits("eager-1f1b", 3, 16, pace=Pace(3.0, (6.0, 0.0))) == (5, 2, 1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_users_word_replaces_all_others(name: str) -> None:
    assert limits(name, 3, 8, pace=alike(3, 3.0, 9.0), in_flight=2) == (2, 2, 2)
    assert limits(name, 3, 8, in_flight=50) == (8, 8, 8)
    assert limits(name, 3, 8, in_flight=(3, 5, 2)) == (3, 3, 2)


@pytest.mark.parametrize("in_flight", [0, -1, "2", 1.5, [2, 0], True])
def test_a_users_word_that_is_no_count_is_refused(in_flight: int) -> None:
    with pytest.raises(OptionError, match="in_flight="):
        limits("1f1b", 2, 8, in_flight=in_flight)


def test_a_limit_for_each_stage_or_one_for_all() -> None:
    with pytest.raises(OptionError, match="2 limits for 3 stages"):
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
    measured = pace([Work(1.0, 2.0)] * stages, uniform(stages, seconds=seconds, delay=delay))
    made = limits(name, stages, micro_batches, pace=measured)
    assert len(made) == stages
    assert list(made) == sorted(made, reverse=True)
    assert 1 <= made[-1] <= made[0] <= micro_batches
