"""Plans searched in advance: what is stored for a problem is what a search of it finds, and serves no other problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.planner.problems import draw_problem
from tests.unit.planner.test_explanation import MIB, make_problem
from whale_nebula.planner import stored_plans
from whale_nebula.planner.problem import Options, Problem
from whale_nebula.planner.search import search
from whale_nebula.planner.stored_plans import find_stored_plan, format_problem, plans_path, search_in_advance
from whale_nebula.schedule.lines import Line


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(1, 4))])
@pytest.mark.parametrize("kind", ["", "written", "split"])
def test_stored_plan_is_that_of_a_search(kind: str, seed: int) -> None:
    problem = draw_problem(seed, kind)
    search_in_advance([format_problem(problem)])
    candidates, date = find_stored_plan(problem)
    assert repr(candidates) == repr(search(problem).candidates) and bool(date) == bool(candidates)


def _change_chain(problem: Problem) -> Problem:
    return replace(problem, chain=replace(problem.chain, weights=np.nextafter(problem.chain.weights, np.inf)))


def _change_speed(problem: Problem) -> Problem:
    first, *others = problem.clusters
    return replace(problem, clusters=(replace(first, forward=np.nextafter(first.forward, np.inf)), *others))


OTHERS: dict[str, Callable[[Problem], Problem]] = {
    "program": _change_chain,
    "measured blocks": _change_speed,
    "measured link": lambda problem: replace(problem, lines={**problem.lines, (0, 1): Line(rate=7.4e6, delay=0.005)}),
    "options": lambda problem: replace(problem, options=Options(max_micro_batches=4)),
    "rows": lambda problem: replace(problem, rows=problem.rows + 1),
}


@pytest.mark.parametrize("change", list(OTHERS))
def test_stored_plan_serves_no_other_problem(change: str) -> None:
    problem = make_problem()
    search_in_advance([format_problem(problem)])
    assert find_stored_plan(problem)[0] and find_stored_plan(OTHERS[change](problem)) == ((), "")


def test_stored_plan_of_another_planner_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem()
    search_in_advance([format_problem(problem)])
    monkeypatch.setattr(stored_plans, "_digest_code", lambda: "another version")
    assert find_stored_plan(problem) == ((), "")


def _exceed_cluster(part: dict[str, Any]) -> None:
    part["cluster"] = 7


def _exceed_memory(part: dict[str, Any]) -> None:
    part["begin"], part["end"], part["cluster"] = 0, 5, 0


@pytest.mark.parametrize("damage", [_exceed_cluster, _exceed_memory])
def test_damaged_plan_is_not_used(damage: Callable[[dict[str, Any]], None]) -> None:
    """One that the file's owner, or a broken disk, has changed: it is scored again before it is used."""
    problem = make_problem(memory=60 * MIB)
    search_in_advance([format_problem(problem)])
    document = json.loads(plans_path().read_text())
    (stored,) = document["plans"].values()
    stored["shapes"][0]["parts"] = stored["shapes"][0]["parts"][:1]
    damage(stored["shapes"][0]["parts"][0])
    plans_path().write_text(json.dumps(document))
    assert find_stored_plan(problem) == ((), "")
    plans_path().write_text("{")
    assert find_stored_plan(problem) == ((), "")
