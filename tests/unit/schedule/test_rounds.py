"""The schedule of local SGD's rounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.schedule.rounds import GRAIN, Timetable, choose_delay, choose_fragments, list_ranges, share_rows


@st.composite
def tables(draw: st.DrawFn) -> Timetable:
    every = draw(st.integers(1, 60))
    return Timetable(every, draw(st.integers(1, every)), draw(st.integers(0, every - 1)))


@given(tables(), st.integers(0, 200))
def test_fragments_are_sent_once_per_round(table: Timetable, begin: int) -> None:
    sent = [f for step in range(begin + 1, begin + table.every + 1) for f in table.sends(step)]
    assert sorted(sent) == list(range(table.fragments))


@given(tables())
def test_fragment_is_received_before_it_is_sent_again(table: Timetable) -> None:
    on_way: set[int] = set()
    for step in range(1, 4 * table.every + 1):
        for fragment in table.sends(step):
            assert fragment not in on_way
            on_way.add(fragment)
        for fragment in table.applies(step):
            on_way.remove(fragment)


@given(st.integers(0, 100_000), st.integers(1, 12))
def test_ranges_partition_the_numbers(total: int, fragments: int) -> None:
    found = list_ranges(total, fragments)
    assert [begin for begin, _ in found] == [0, *[end for _, end in found[:-1]]]
    assert found[-1][1] == total
    assert len(found) == fragments
    assert all(begin % GRAIN == 0 for begin, _ in found)


@given(st.lists(st.floats(0.1, 50.0), min_size=1, max_size=6), st.integers(0, 300))
def test_rows_are_distributed_by_speed(speeds: list[float], more: int) -> None:
    rows = len(speeds) + more
    found = share_rows(rows, tuple(speeds))
    assert [begin for begin, _ in found] == [0, *[end for _, end in found[:-1]]]
    assert found[-1][1] == rows
    for (begin, end), speed in zip(found, speeds, strict=True):
        assert end - begin >= 1
        assert abs(end - begin - 1 - more * speed / sum(speeds)) < 1.0


@given(st.integers(1, 10_000), st.integers(0, 10**8))
def test_default_fragments_and_delay_are_valid(every: int, total: int) -> None:
    table = Timetable(every, choose_fragments(total, every), choose_delay(every))
    assert 1 <= table.fragments <= every
    assert 0 <= table.delay < every
