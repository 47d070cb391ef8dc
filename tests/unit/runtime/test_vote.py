"""The vote before an update whether a step is left out, with the same result in all processes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.runtime.sessions import sessions
from whale_nebula.errors import PlanMismatchError

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
