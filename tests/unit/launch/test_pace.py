"""How many tensors are sent, and what their arrivals say."""

from __future__ import annotations

import pytest

from whale_nebula.launch.link_measurement import LEAST_TENSORS, MOST_BYTES, first_count, full_count, next_count, rate

KIB = 1 << 10


def test_a_slow_beginning_is_not_counted() -> None:
    slow = [0.0, 10.0, 20.0]
    assert rate([*slow, *(20.0 + number for number in range(1, 11))], 1000) == pytest.approx(1000)


def test_two_arrivals_are_enough() -> None:
    assert rate([3.0, 5.0], 1000) == 500


def test_arrivals_at_once_are_no_division_by_nothing() -> None:
    assert rate([1.0, 1.0], 1000) > 0


@pytest.mark.parametrize("bytes_a_second", [1e4, 1e6, 1e8, 1e10])
def test_bursts_grow_until_the_line_is_known(bytes_a_second: float) -> None:
    size, seconds, spent = 64 * KIB, 4.0, 0.0
    count: int | None = first_count(size)
    while count is not None:
        took = count * size / bytes_a_second
        spent += took
        before, count = count, next_count(count, size, took, seconds)
    assert before * size <= MOST_BYTES
    if bytes_a_second >= 1e6:
        assert spent <= seconds


@pytest.mark.parametrize(("found", "count"), [(7.5e6, 28), (1.0, LEAST_TENSORS), (1e12, MOST_BYTES >> 20)])
def test_a_burst_takes_as_long_as_was_asked_for(found: float, count: int) -> None:
    assert full_count(found, 1 << 20, 4.0) == count
