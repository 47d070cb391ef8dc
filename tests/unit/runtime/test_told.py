"""Statistics of a step's channels: sums, both ends in one process, and changes."""

from dataclasses import replace

import pytest

from whale_nebula.codec import INT8, Rank, parse
from whale_nebula.codec.precisions import Bits
from whale_nebula.codec.way import Way, parse_way
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.state import ChannelState, Tally, note_changes

NAME = "b0 gpu->npu"
SENT = BoundaryReport("int8", 400, 100, 120, 1, 0.5, 0.0, 0.01)


def test_what_both_ends_tell_counts_once() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add(NAME, SENT)
        tally.took(NAME, BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25))
    found = tally.reports()[NAME]
    assert found == BoundaryReport("int8", 800, 200, 240, 2, 1.0, 0.5, 0.01)


def test_what_is_only_taken_in_here_is_told_as_it_came() -> None:
    tally = Tally()
    tally.took(NAME, BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25))
    assert tally.reports() == {NAME: BoundaryReport("int8", 400, 100, 120, 1, decode_seconds=0.25)}


def test_a_change_that_both_ends_see_is_said_once_and_is_a_note_of_its_boundary() -> None:
    tally = Tally()
    tally.add(NAME, SENT)
    for _ in range(2):
        tally.note_change(NAME, "fp16 -> int8")
    assert tally.changes() == (f"{NAME}: fp16 -> int8",)
    assert tally.reports()[NAME].notes == ("fp16 -> int8",)
    assert tally.notes() == ()


def test_a_note_that_stays_is_said_once_in_a_step() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(NAME, BoundaryReport(notes=("it is so",)))
    tally.took(NAME, BoundaryReport(notes=("it is so",)))
    assert tally.notes() == (f"{NAME}: it is so",)
    assert tally.reports()[NAME].notes == ("it is so",)


def test_the_first_reason_to_leave_a_step_out_stays() -> None:
    tally = Tally()
    assert tally.left_out == ""
    tally.leave_out("one")
    tally.leave_out("two")
    assert tally.left_out == "one"


@pytest.mark.parametrize(
    ("way", "before", "codec", "expected"),
    [
        ("int8", "", "int8", []),
        ("int8", "int8", "int8", []),
        ("int8, from step 3", "none", "int8", ["none -> int8"]),
        ("int8, ramp fp16 below 0.05", "fp16", "int8", ["fp16 -> int8"]),
        ("auto", "", "int4", ["none -> int4"]),
        ("auto", "", None, []),
        ("int8", "int8", None, ["int8 -> none"]),
    ],
)
def test_a_codec_that_is_another_than_before_is_told(
    way: str, before: str, codec: str | None, expected: list[str]
) -> None:
    tally, state = Tally(), ChannelState(codec=before, error=0.5)
    found = note_changes(tally, NAME, parse_way(way), state, state, codec and parse(codec))
    assert tally.changes() == tuple(f"{NAME}: {what}" for what in expected)
    assert found.codec == str(codec or "none")
    known = before or ("none" if way == "auto" else "")
    assert found.error == (0.5 if known == found.codec else None)


def test_a_basis_that_crosses_is_told() -> None:
    tally, state, codec = Tally(), ChannelState(codec="rank(4) >> int8", version=1), Rank(4) >> INT8()
    note_changes(tally, NAME, Way(codec), state, replace(state, version=2), codec)
    assert tally.changes() == (f"{NAME}: basis 1 -> 2",)


def test_whole_numbers_that_cross_as_they_are_have_not_changed() -> None:
    tally, state = Tally(), ChannelState()
    for codec in (Bits(), None, Bits()):
        state = note_changes(tally, NAME, Way(Bits()), state, state, codec)
    assert tally.changes() == () and state.error == 0.0
