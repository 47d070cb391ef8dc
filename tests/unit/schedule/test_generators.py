"""The instruction lists: literally, and their invariants."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError
from whale_nebula.schedule.schedules import (
    PARTED,
    SCHEDULES,
    Backward,
    BackwardWeights,
    Forward,
    Fused,
    delays,
    instructions,
    limit_of,
    limits,
    to_text,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules.txt"
names = st.sampled_from(sorted(SCHEDULES))


def all_lists() -> Iterator[str]:
    """What the golden file holds: each list for up to four stages and six micro-batches."""
    for name, limit in SCHEDULES.items():
        for stages in range(1, 5):
            for micro_batches in range(1, 7):
                chosen = [limit(stage, stages, micro_batches) for stage in range(stages)]
                later = delays(chosen, micro_batches, [stage == stages - 1 for stage in range(stages)])
                for stage in range(stages):
                    delay = later[stage] if name in PARTED else None
                    text = to_text(instructions(stage, stages, micro_batches, chosen[stage], delay=delay))
                    yield f"{name} p={stages} m={micro_batches} s={stage}: {text}"


def test_lists_are_those_of_the_golden_file() -> None:
    assert list(all_lists()) == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize("stage", [0, 2])
def test_without_a_backward_there_are_forwards_only(stage: int) -> None:
    assert to_text(instructions(stage, 3, 3, 1, backward=False)) == "F0 F1 F2"


def test_a_last_stage_may_run_apart_and_another_one_fused() -> None:
    assert to_text(instructions(1, 2, 3, 1, fused=False)) == "F0 B0 F1 B1 F2 B2"
    assert to_text(instructions(0, 2, 3, 2, fused=True)) == "FB0 FB1 FB2"


def test_the_phase_is_part_of_each_instruction() -> None:
    assert to_text(instructions(0, 2, 2, 2, phase=1)) == "1:F0 1:F1 1:B0 1:B1"
    assert to_text(instructions(1, 2, 2, 1, phase=1)) == "1:FB0 1:FB1"
    assert to_text(instructions(1, 2, 2, 1, phase=1, backward=False)) == "1:F0 1:F1"


def test_kinds_differ_even_for_the_same_micro_batch() -> None:
    assert len({Forward(1), Backward(1), Fused(1), BackwardWeights(1), Forward(1, phase=1)}) == 5


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ((0, 1), "micro_batch"),
        ((True, 1), "micro_batch"),
        ((4, 0), "in_flight"),
        ((4, "4"), "in_flight"),
        ((2.5, 1), "micro_batch"),
    ],
)
def test_counts_are_checked_at_once(given: tuple[int, int], word: str) -> None:
    with pytest.raises(OptionError, match=f"{word}="):
        instructions(0, 2, *given)


@given(names, st.integers(1, 6), st.integers(1, 30), st.none() | st.integers(1, 40), st.data())
def test_every_micro_batch_goes_forward_and_backward_once_in_order(
    name: str, stages: int, micro_batches: int, in_flight: int | None, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    limit = limit_of(name)(stage, stages, micro_batches) if in_flight is None else in_flight
    made = list(instructions(stage, stages, micro_batches, limit))
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
    limit = limit_of(name)(stage, stages, micro_batches) if in_flight is None else in_flight
    held, most = 0, 0
    for instruction in instructions(stage, stages, micro_batches, limit):
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
def test_gradients_of_weights_come_in_order_and_keep_no_more_than_the_first_stage_holds(
    stages: int, micro_batches: int, in_flight: int | list[int] | None, data: st.DataObject
) -> None:
    given_limits = in_flight[:stages] if isinstance(in_flight, list) else in_flight
    chosen = limits("zero-bubble", stages, micro_batches, in_flight=given_limits)
    stage = data.draw(st.integers(0, stages - 1))
    fused = [each == stages - 1 for each in range(stages)]
    delay = delays(chosen, micro_batches, fused, in_flight=given_limits)[stage]
    made = list(instructions(stage, stages, micro_batches, chosen[stage], delay=delay))
    for letter in "FBW":
        assert [each.micro_batch for each in made if letter in each.letters] == list(range(micro_batches))
    held, most = 0, 0
    for instruction in made:
        held += ("F" in instruction.letters) - (instruction.letters == "W")
        most = max(most, held)
    assert most <= (chosen[stage] if isinstance(in_flight, list) else chosen[0])
    assert [each for each in made if each.letters != "W"] == list(
        instructions(stage, stages, micro_batches, chosen[stage])
    )
