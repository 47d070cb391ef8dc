"""Every plan that the planner proposes trains as the uncut model: scripts without a scope, and clusters of many kinds.

`make test` runs a sample of the scripts with one plan each; `--grid` all of them with several.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.cases import CASES, FAMILIES
from tests.same import Cut, Outcome, assert_same
from whale_nebula.planner.search import Found, search
from whale_nebula.runtime import auto

SAMPLE = {"zoo": 3, "keras": 48, "loops": 48}
"""Of each family, every n-th script is in the sample. Placed models say themselves what is where."""
PLANS = 4
SLOW = {
    name: {"flops": "1G", "workers": [f"{name}.example:{7000 + number}" for number in range(count)]}
    for name, count in (("c0", 1), ("c1", 2), ("c2", 1))
}


@dataclass(frozen=True)
class Planned(Cut):
    """No scopes; what is a step of one's own stands under `nb.function`."""

    @contextlib.contextmanager
    def program(self, **options: Any) -> Iterator[None]:
        """Nothing: the planner says it."""
        yield

    def at(self, third: int) -> contextlib.AbstractContextManager[Any]:
        """Nothing."""
        return contextlib.nullcontext()


@functools.cache
def plain(name: str) -> Outcome:
    """The uncut run, once for all plans."""
    return CASES[name].run(Cut(0))


def proposals(monkeypatch: pytest.MonkeyPatch, number: int) -> list[Any]:
    """Let the planner choose one of the plans that it considers, those of several stages first; gives the choices."""
    chosen: list[Any] = []

    def choose(problem: Any, most: int = 8) -> Found:
        cheap = replace(problem, sites=tuple(replace(site, call=0.0) for site in problem.sites))
        found = search(cheap, 24).candidates
        assert found, "nothing fits"
        several = [each for each in found if len(each.parts) > 1] or list(found)
        chosen.append(several[number % len(several)])
        return Found((chosen[-1], *found))

    monkeypatch.setattr(auto, "search", choose)
    return chosen


def matrix() -> Iterator[Any]:
    """A parameter for each script and plan; most are of the grid."""
    for family in SAMPLE:
        for place, name in enumerate(FAMILIES[family]):
            for number in range(PLANS):
                sampled = number == place // SAMPLE[family] % PLANS and place % SAMPLE[family] == SAMPLE[family] // 2
                marks = () if sampled else (pytest.mark.grid,)
                yield pytest.param(f"{family} {name}", number, marks=marks, id=f"{family} {name}: plan {number}")


@pytest.mark.parametrize(("name", "number"), list(matrix()))
def test_what_is_proposed_trains_as_the_uncut_model(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, expected = CASES[name], plain(name)
    nb.shutdown()
    nb.init({"clusters": SLOW}, links="1gbit,0ms")
    chosen = proposals(monkeypatch, number)
    with nb.auto_parallel(micro_batch=None if max(case.micro) > 1 else 1):
        found = case.run(Planned(1))
    assert chosen or set(found.stages) <= {"stage0"}, "nothing was planned"
    assert_same(expected, found, case.tolerance, case.length)
