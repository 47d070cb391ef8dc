"""The lists themselves: literally, and what holds for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError
from whale_nebula.schedule import SCHEDULES, Backward, Forward, Fused, schedule, to_text
from whale_nebula.schedule.schedules import eager_one_f_one_b, gpipe, one_f_one_b

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules.txt"
names = st.sampled_from(sorted(SCHEDULES))


def all_lists() -> Iterator[str]:
    """What the golden file holds: each list for up to four stages and six micro-batches."""
    for name, made in SCHEDULES.items():
        for stages in range(1, 5):
            for micro_batches in range(1, 7):
                for stage in range(stages):
                    text = to_text(made.generate(stage, stages, micro_batches))
                    yield f"{name} p={stages} m={micro_batches} s={stage}: {text}"


def test_lists_are_those_of_the_golden_file() -> None:
    assert list(all_lists()) == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (0, "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),
        (1, "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),
        (2, "FB0 FB1 FB2 FB3 FB4"),
    ],
)
def test_gpipe(stage: int, text: str) -> None:
    assert to_text(gpipe(stage, 3, 5)) == text


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        (1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (2, "FB0 FB1 FB2 FB3 FB4"),
    ],
)
def test_one_f_one_b(stage: int, text: str) -> None:
    assert to_text(one_f_one_b(stage, 3, 5)) == text


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (0, "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5"),
        (1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"),
        (2, "FB0 FB1 FB2 FB3 FB4 FB5"),
    ],
)
def test_eager_one_f_one_b(stage: int, text: str) -> None:
    assert to_text(eager_one_f_one_b(stage, 3, 6)) == text


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_limit_makes_all_schedules_one(name: str) -> None:
    made = schedule(name).generate(0, 3, 5, 2)
    assert to_text(made) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("stage", [0, 2])
def test_without_a_backward_there_are_forwards_only(name: str, stage: int) -> None:
    assert to_text(schedule(name).generate(stage, 3, 3, 1, backward=False)) == "F0 F1 F2"


def test_a_last_stage_may_run_apart_and_another_one_fused() -> None:
    assert to_text(one_f_one_b(1, 2, 3, fused=False)) == "F0 B0 F1 B1 F2 B2"
    assert to_text(gpipe(1, 2, 3, fused=False)) == "F0 F1 F2 B0 B1 B2"
    assert to_text(one_f_one_b(0, 2, 3, fused=True)) == "FB0 FB1 FB2"


def test_the_phase_is_part_of_each_instruction() -> None:
    assert to_text(one_f_one_b(0, 2, 2, phase=1)) == "1:F0 1:F1 1:B0 1:B1"
    assert to_text(one_f_one_b(1, 2, 2, phase=1)) == "1:FB0 1:FB1"
    assert to_text(one_f_one_b(1, 2, 2, phase=1, backward=False)) == "1:F0 1:F1"


@pytest.mark.parametrize("micro_batches", [0, -1, 2.5, True])
def test_a_count_of_micro_batches_is_checked_at_once(micro_batches: int) -> None:
    with pytest.raises(OptionError, match="micro_batch="):
        gpipe(0, 2, micro_batches)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("in_flight", [0, -3, "4"])
def test_a_limit_is_checked_at_once(name: str, in_flight: int) -> None:
    with pytest.raises(OptionError, match="in_flight="):
        schedule(name).generate(0, 2, 4, in_flight)


@given(names, st.integers(1, 6), st.integers(1, 30), st.none() | st.integers(1, 40), st.data())
def test_every_micro_batch_goes_forward_and_backward_once_in_order(
    name: str, stages: int, micro_batches: int, in_flight: int | None, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    made = list(schedule(name).generate(stage, stages, micro_batches, in_flight))
    for letter in "FB":
        assert [i.micro_batch for i in made if letter in i.letters] == list(range(micro_batches))
    for micro_batch in range(micro_batches):
        if stage < stages - 1:
            assert made.index(Forward(micro_batch)) < made.index(Backward(micro_batch))
    assert (stage == stages - 1) == any(isinstance(i, Fused) for i in made)


@given(names, st.integers(2, 6), st.integers(1, 30), st.none() | st.integers(1, 40), st.data())
def test_never_more_in_flight_than_the_limit_and_the_limit_is_used(
    name: str, stages: int, micro_batches: int, in_flight: int | None, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 2))
    chosen = schedule(name)
    limit = chosen.limit(stage, stages, micro_batches) if in_flight is None else in_flight
    held, most = 0, 0
    for instruction in chosen.generate(stage, stages, micro_batches, in_flight):
        held += 1 if isinstance(instruction, Forward) else -1
        most = max(most, held)
    assert held == 0
    assert most == min(limit, micro_batches)
