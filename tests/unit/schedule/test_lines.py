"""Work, lines and hops: their sums."""

import pytest

from whale_nebula.schedule.lines import Hop, Line, Work, compute_pace, make_hop, make_uniform_hops


def test_work_without_a_backward_has_no_backward_seconds() -> None:
    work = Work(1.0)
    assert not work.has_backward
    assert (work.seconds_of("B"), work.seconds) == (0.0, 1.0)
    assert Work(1.0, 0.0).has_backward


def test_round_trip_adds_both_directions() -> None:
    hop = Hop(Line("a->b", 100.0, 0.5), Line("b->a", 10.0, 0.25), forward=200.0, backward=30.0)
    assert hop.round_trip == pytest.approx(2.0 + 0.5 + 3.0 + 0.25)
    assert Hop(forward=1e9, backward=1e9).round_trip == 0.0


def round_trip_hop(name: str, back: str, seconds: float, delay: float = 0.0) -> Hop:
    return make_hop(name, back, seconds=seconds, delay=delay)


@pytest.mark.parametrize(
    ("hops", "trips", "held"),
    [
        ({(0, 1): round_trip_hop("a->b", "b->a", 1.0, 2.0), (1, 2): Hop()}, (6.0, 0.0), 1.0),
        # stages 0 and 2 in cluster a, stage 1 in b: activations of (1, 2) and gradients of (0, 1) go b->a
        ({(0, 1): round_trip_hop("a->b", "b->a", 1.0), (1, 2): round_trip_hop("b->a", "a->b", 2.0)}, (2.0, 4.0), 3.0),
        # over skips the longest way
        ({**make_uniform_hops(3, seconds=1.0), (0, 2): round_trip_hop("a->c", "c->a", 9.0)}, (16.0, 2.0), 9.0),
        ({(0, 2): round_trip_hop("a->c", "c->a", 1.0), (1, 2): round_trip_hop("b->c", "c->b", 1.0)}, (0.0, 2.0), 1.0),
        ({(0, 2): round_trip_hop("a->c", "c->a", 1.0), (1, 2): round_trip_hop("b->c", "c->b", 5.0)}, (0.0, 10.0), 5.0),
    ],
)
def test_pace_of_several_hops(hops: dict[tuple[int, int], Hop], trips: tuple[float, ...], held: float) -> None:
    found = compute_pace([Work(1.0, 2.0), Work(2.0, 3.0, overhead=0.5), Work(1.0)], hops)
    assert (found.compute, found.trips, found.occupied_seconds) == (5.5, trips, held)
