"""Instructions are small, frozen, and have a text that reads back."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError
from whale_nebula.schedule import Backward, Forward, Fused, from_text, to_text

instructions = st.builds(
    lambda kind, micro_batch, phase: kind(micro_batch, phase),
    st.sampled_from([Forward, Backward, Fused]),
    st.integers(0, 999),
    st.integers(0, 9),
)


def test_text_names_kind_and_micro_batch() -> None:
    assert to_text([Forward(0), Forward(11), Backward(0), Fused(3)]) == "F0 F11 B0 FB3"


def test_text_names_the_phase_unless_it_is_the_first() -> None:
    assert to_text([Forward(0, phase=0), Forward(0, phase=2), Fused(1, phase=1)]) == "F0 2:F0 1:FB1"


@given(st.lists(instructions, max_size=20))
def test_text_reads_back(made: list[Forward | Backward | Fused]) -> None:
    assert from_text(to_text(made)) == tuple(made)


@pytest.mark.parametrize("word", ["X0", "F", "BF0", "F-1", "1F0", "f0", ":F0"])
def test_what_is_no_instruction_is_named(word: str) -> None:
    with pytest.raises(OptionError, match="is not an instruction") as caught:
        from_text(f"F0 {word}")
    assert repr(word) in caught.value.what
    assert "FB0" in caught.value.mend


def test_kinds_differ_even_for_the_same_micro_batch() -> None:
    assert len({Forward(1), Backward(1), Fused(1), Forward(1, phase=1)}) == 4


def test_instructions_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Forward(0).micro_batch = 1  # type: ignore[misc]
    assert not hasattr(Forward(0), "__dict__")
