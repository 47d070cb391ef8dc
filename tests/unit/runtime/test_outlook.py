"""Estimates for lines and stages before a step."""

import pytest

from whale_nebula.config import parse_links
from whale_nebula.report.records import Span
from whale_nebula.runtime.step.measured import CLOSE, LARGE, LineRates, slowest

LINK, MUCH = "gpu->npu", 16 * LARGE


def sent(size: int, seconds: float, link: str = LINK) -> Span:
    return Span(link, "forward 0", 1.0, 1.0 + seconds, 0, 0, size)


def rate(seen: LineRates) -> float | None:
    return seen.outlook([1], {}).rates.get(LINK)


def test_before_a_step_has_run_the_config_says_it() -> None:
    assert rate(LineRates((LINK,), parse_links("80mbit"))) == 1e7
    assert rate(LineRates((LINK,), parse_links("20ms"))) is None


@pytest.mark.parametrize(("exact", "expected"), [(True, MUCH / 0.1), (False, 1e7)])
def test_what_was_written_is_believed_on_emulated_lines_and_elsewhere_if_it_is_slower(
    exact: bool, expected: float
) -> None:
    seen = LineRates((LINK,), parse_links("80mbit"), exact=exact)
    seen.add([sent(MUCH, 0.1)])
    assert rate(seen) == pytest.approx(expected)
    seen.add([sent(MUCH, 9.9)])
    assert rate(seen) == pytest.approx(2 * MUCH / 10)


def test_small_messages_say_nothing_of_a_real_line_and_what_was_known_stays() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add([sent(LARGE - 1, 1e-6)])
    assert rate(seen) is None
    seen.add([*row(1, LARGE - 1, 1e-6), *row(1, MUCH, 1.0, start=9.0)])
    for _ in range(30):
        seen.add([sent(LARGE - 1, 1e-6)])
    assert rate(seen) == pytest.approx(MUCH)


def test_a_line_as_fast_as_memory_has_no_rate() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    seen.add([sent(MUCH, 0.0)])
    assert rate(seen) is None


def test_it_follows_the_line_within_ten_steps() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    for _ in range(30):
        seen.add([sent(1000, 1.0)])
    for _ in range(10):
        seen.add([sent(1000, 0.001)])
    assert rate(seen) == pytest.approx(1e6)


def test_only_links_from_here_count_and_the_bytes_of_the_last_step() -> None:
    seen = LineRates((LINK,), parse_links(None), exact=True)
    seen.add([sent(1000, 1.0)])
    seen.add([sent(1000, 1.0), sent(2000, 1.0), sent(7, 1.0, "npu->gpu")])
    found = seen.outlook([4, 4, 3], {"0.0.fused": 0.5, "0.1.fused": 0.25})
    assert (found.rows, found.compute, found.carried) == ([4, 4, 3], 1.5, {LINK: 3000})


def test_the_slowest_stage_is_found_over_phases_and_directions() -> None:
    assert slowest({}, 4) is None
    assert slowest({"once": 3.0}, 4) is None
    medians = {"0.0.forward": 1.0, "1.0.backward": 2.0, "0.1.fused": 2.5}
    assert slowest(medians, 2) == 6.0


# ---------------------------------------------------------------------- real lines and small messages
def row(count: int, size: int, seconds: float, gap: float = 1e-5, start: float = 1.0) -> list[Span]:
    """Messages of one line, with a pause between each two."""
    starts = (start + number * (seconds + gap) for number in range(count))
    return [Span(LINK, "forward 0", at, at + seconds, 0, 0, size) for at in starts]


def test_small_messages_that_wait_for_each_other_are_one_large_one() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add(row(8, LARGE // 4, 0.1))
    assert rate(seen) == pytest.approx(LARGE / 4 / 0.1, rel=1e-3)
    seen.add(list(reversed(row(8, LARGE // 4, 0.3))))
    assert rate(seen) == pytest.approx(LARGE / 4 / 0.2, rel=1e-3), "in whatever order they are told"


@pytest.mark.parametrize(("count", "gap"), [(8, 10 * CLOSE), (3, 0.0)], ids=["with pauses", "too few"])
def test_what_does_not_fill_the_line_says_nothing_of_it(count: int, gap: float) -> None:
    seen = LineRates((LINK,), parse_links("80mbit"))
    seen.add(row(count, LARGE // 4, 1e-5, gap))
    assert rate(seen) == 1e7 and seen.outlook([1], {}).unseen == {LINK}


def test_a_pause_parts_two_runs_and_is_no_time_of_the_line() -> None:
    seen = LineRates((LINK,), parse_links(None))
    seen.add([*row(4, LARGE // 4, 0.1, 0.0), *row(8, LARGE // 4, 0.1, 0.0, start=9.0), *row(1, 8, 0.1, start=20.0)])
    assert rate(seen) == pytest.approx(LARGE / 4 / 0.1)


def test_a_link_of_which_a_rate_was_seen_or_that_carried_nothing_is_not_unseen() -> None:
    seen = LineRates((LINK, "npu->gpu"), parse_links(None))
    assert not seen.outlook([1], {}).unseen
    seen.add([sent(10, 1e-6)])
    assert seen.outlook([1], {}).unseen == {LINK}
    seen.add([sent(MUCH, 1.0)])
    seen.add([sent(10, 1e-6)])
    assert not seen.outlook([1], {}).unseen
    exact = LineRates((LINK,), parse_links(None), exact=True)
    exact.add([sent(10, 0.0)])
    assert not exact.outlook([1], {}).unseen
