"""The leading program of a loop that trains several: the one whose steps the position counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from whale_nebula.checkpoint.manifest import Position
from whale_nebula.runtime.checkpoint.known import Leading


def count_steps(programs: str) -> tuple[str, int]:
    """The leading program and its steps after one step of each of these programs and the end of the loop."""
    leading, position, counts = Leading(), Position(), Counter[str]()
    for program in programs:
        position = leading.choose(position, program)
        counts[program] += 1
        position = replace(position, programs=dict(counts))
        if program == position.program:
            position = replace(position, step=position.step + 1)
    position = leading.count_last(position)
    return position.program, position.step


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ("", ("", 0)),
        ("aaa", ("a", 3)),
        ("dgdgdg", ("d", 3)),  # a discriminator and a generator in turn: steps of one are counted
        ("dddgdddgdddg", ("d", 9)),
        ("aaabbb", ("b", 6)),  # one model after the other: all steps are counted
        ("aaabcbcbc", ("b", 6)),
        ("aaa" + "b" * 40, ("b", 43)),
        ("aaab" + "ab" * 40, ("a", 43)),
        ("abbb", ("a", 1)),  # one step alone: whether the other trains in turn with it is not known yet
    ],
)
def test_steps_are_those_of_the_program_that_leads(programs: str, expected: tuple[str, int]) -> None:
    assert count_steps(programs) == expected
