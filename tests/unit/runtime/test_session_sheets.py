"""A peer's messages in a session are accepted, or refused with this library's errors."""

from __future__ import annotations

import pytest

from tests.fuzz import sheets
from whale_nebula.errors import LocalProtocolError
from whale_nebula.wire.message import KINDS, TABLE, build_message, find_fault


def test_a_sample_of_hostile_sheets() -> None:
    counts = sheets.run(seed=7, count=60)
    assert min(counts[how] for how in ("refused", "told", "taken")) > 10, counts


@pytest.mark.parametrize("about", sheets.TRUE)
def test_true_sheets_fit_the_registry(about: str) -> None:
    message = build_message("SESSION", about, **sheets.TRUE[about])
    assert find_fault(message) == ""


def test_a_message_without_an_entry_cannot_be_built() -> None:
    with pytest.raises(LocalProtocolError, match="'SESSION VETO', which no registry has"):
        build_message("SESSION", "VETO", why="")


def test_every_kind_has_a_word_that_the_table_of_states_knows() -> None:
    assert {entry.word for entry in KINDS.values()} <= {word for _, word in TABLE}
