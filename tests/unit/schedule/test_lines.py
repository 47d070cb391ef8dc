"""Work, lines and hops: what they add up to."""

import pytest

from whale_nebula.schedule import Hop, Line, Work, hop_of_seconds, pace, uniform


def test_work_without_a_backward() -> None:
    work = Work(1.0)
    assert not work.has_backward
    assert (work.of("B"), work.seconds) == (0.0, 1.0)
    assert Work(1.0, 0.0).has_backward


def test_a_round_trip_counts_each_direction_by_its_own_line() -> None:
    hop = Hop(Line("a->b", 100.0, 0.5), Line("b->a", 10.0, 0.25), forward=200.0, backward=30.0)
    assert hop.round_trip == pytest.approx(2.0 + 0.5 + 3.0 + 0.25)
    assert Hop(forward=1e9, backward=1e9).round_trip == 0.0


def test_pace_of_unequal_stages_is_that_of_the_slowest() -> None:
    works = [Work(1.0, 2.0), Work(2.0, 3.0, overhead=0.5), Work(1.0)]
    assert pace(works, uniform(3)).compute == 5.5


def test_pace_gives_each_hop_its_own_trip() -> None:
    hops = {(0, 1): hop_of_seconds("a->b", "b->a", seconds=1.0, delay=2.0), (1, 2): Hop()}
    assert pace([Work(1.0, 2.0)] * 3, hops).trips == (6.0, 0.0)


def test_pace_knows_that_a_way_back_shares_the_line_of_another_way_there() -> None:
    """Stages 0 and 2 in cluster a, stage 1 in b: activations of (1, 2) and gradients of (0, 1) go b->a."""
    hops = {(0, 1): hop_of_seconds("a->b", "b->a", seconds=1.0), (1, 2): hop_of_seconds("b->a", "a->b", seconds=2.0)}
    assert pace([Work(1.0, 2.0)] * 3, hops).held == 3.0


def test_pace_takes_the_longest_way_over_skips() -> None:
    hops = {**uniform(3, seconds=1.0), (0, 2): hop_of_seconds("a->c", "c->a", seconds=9.0)}
    assert pace([Work(1.0, 2.0)] * 3, hops).trips == (16.0, 2.0)


def test_pace_where_a_stage_feeds_only_one_further_on() -> None:
    hops = {(0, 2): hop_of_seconds("a->c", "c->a", seconds=1.0), (1, 2): hop_of_seconds("b->c", "c->b", seconds=1.0)}
    assert pace([Work(1.0, 2.0)] * 3, hops).trips == (0.0, 2.0)
    slower = {**hops, (1, 2): hop_of_seconds("b->c", "c->b", seconds=5.0)}
    assert pace([Work(1.0, 2.0)] * 3, slower).trips == (0.0, 10.0)
