"""Messages of a session, also hostile ones; and the vote before an update, with the same result in all processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuzz import sheets
from tests.unit.runtime.sessions import sessions
from whale_nebula.errors import LocalProtocolError, PlanMismatchError
from whale_nebula.wire.message import KINDS, TABLE, build_message, find_fault

WORKERS = ("a/0", "b/0", "c/0")


def votes(*reasons: str, phases: tuple[int, ...] = (0, 0, 0)) -> list[list[str]]:
    found = sessions(WORKERS)
    with ThreadPoolExecutor(len(WORKERS)) as pool:
        asked = [
            pool.submit(found[worker].vote, "step", 4, phase, why)
            for worker, why, phase in zip(WORKERS, reasons, phases, strict=True)
        ]
        return [each.result() for each in asked]


def test_without_a_reason_the_step_goes_on() -> None:
    assert votes("", "", "") == [[], [], []]


def test_one_reason_is_everybodys() -> None:
    assert votes("", "a NaN", "") == [["a NaN"]] * 3


def test_of_several_reasons_all_take_the_same_first() -> None:
    assert votes("", "two", "one") == [["two", "one"]] * 3


def test_who_is_somewhere_else_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="phase 0 of step 4"):
        votes("", "", "", phases=(0, 1, 0))


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
