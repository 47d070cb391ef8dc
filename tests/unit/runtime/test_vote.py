"""Before an update all processes say whether the step is to be left out, and all do the same."""

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from whale_nebula.errors import PlanMismatchError
from whale_nebula.runtime.session.session import Session
from whale_nebula.transport import MemoryNetwork

WORKERS = ("a/0", "b/0", "c/0")


def sessions() -> dict[str, Session]:
    network = MemoryNetwork()
    links = {(one, other): network.link(one, other, one, other) for one, other in permutations(WORKERS, 2)}
    return {
        worker: Session(worker, {there: link for (here, there), link in links.items() if here == worker}, patience=10.0)
        for worker in WORKERS
    }


def votes(*reasons: str, phases: tuple[int, ...] = (0, 0, 0)) -> list[list[str]]:
    found = sessions()
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
