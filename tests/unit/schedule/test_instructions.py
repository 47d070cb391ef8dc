"""Instructions are small, frozen, and have a text."""

import dataclasses

import pytest

from whale_nebula.schedule import Backward, Forward, Fused, to_text


def test_text_names_the_phase_unless_it_is_the_first() -> None:
    assert to_text([Forward(0), Forward(11, phase=2), Backward(0), Fused(1, phase=1)]) == "F0 2:F11 B0 1:FB1"


def test_kinds_differ_even_for_the_same_micro_batch() -> None:
    assert len({Forward(1), Backward(1), Fused(1), Forward(1, phase=1)}) == 4


def test_instructions_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Forward(0).micro_batch = 1  # type: ignore[misc]
    assert not hasattr(Forward(0), "__dict__")
