"""Every case has the results of the uncut step under a plan: a matrix of cases, cuts and lines.

`make test` runs a sample: of each family every n-th case, each in another cut, and some of them over a line. `--grid`
runs every case in one cut, and `benchmarks/parity` selected ones in all cuts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.cases import CASES, FAMILIES, KERAS, SCHEDULES, list_cuts
from tests.parity_harness import Case, Cut, Outcome, assert_same, run_uncut
from tests.scripts.keras.script import SCRIPTS, Script
from whale_nebula.runtime.step import compiled

SAMPLE = {"zoo": 1, "keras": 72, "loops": 24, "place": 6}
"""Of each module of a family, every n-th case is in the sample, from the middle on."""
TRAPS = frozenset((
    "cond_on_a_number", "everything_returned", "constants_returned", "rate_after_the_loss", "decayed_by_hand",
    "apply_with_variables", "loss_scaled", "recomputed", "scopes_inside", "gradient_in_the_middle", "watched_by_hand",
    "persistent_two_losses", "seeds_of_gradients", "list_of_losses", "stopped_gradient_across", "penalty_in_a_stage",
    "weighted_by_hand", "functional_in_subclassed", "penalty_in_a_subclass", "shared_over_stages",
))  # fmt: skip
"""Scripts that are always in the sample: each covers a former defect of a prototype, or a property of tapes."""
OVER_LINES = {"zoo": 3, "keras": 24, "loops": 12, "place": 3}
"""Of these, every n-th also runs over a line; those of `keras` and `place` only in the grid."""


EVALUATED = frozenset(("mask_into_the_loss", "penalty_in_a_subclass"))
"""Keras scripts that evaluate and predict in the sample, too; the others only train."""


def find_case(name: str, whole: bool) -> Case:
    """A case, as the sample or the grid runs it."""
    case = CASES[name]
    if whole or not isinstance(case.run, Script) or name.partition(" ")[2] in EVALUATED:
        return case
    return replace(case, run=replace(case.run, evaluates=False))


@functools.cache
def run_uncut_case(name: str, whole: bool) -> Outcome:
    """The uncut run, once for all cuts."""
    return run_uncut(find_case(name, whole))


def list_cases() -> Iterator[Any]:
    """A parameter for each case and cut; most are marked `grid`."""
    for family, cases in FAMILIES.items():
        often = [name for name, case in cases.items() if not case.grid_only]
        modules = [list(names) for _, names in itertools.groupby(often, functools.partial(find_module, family))]
        stride = SAMPLE[family]
        trapped = {name for name in cases if name.rpartition(".")[2] in TRAPS}
        if family == "keras":  # a trap stands for its module
            modules = [names for names in modules if trapped.isdisjoint(names)]
        sample = [name for names in modules for name in names[len(names) // 2 % stride :: stride]]
        over_lines = sample[:: OVER_LINES[family]]
        grid_only = (pytest.mark.grid,) if family in ("keras", "place") else ()
        for number, (name, case) in enumerate(cases.items()):
            cuts = list(list_cuts(case))
            local, lines = cuts[: -len(SCHEDULES)], cuts[-len(SCHEDULES) :]
            marks = () if name in sample or name in trapped else (pytest.mark.grid,)
            yield _make_parameter(f"{family} {name}", *local[(number + 3) % len(local)], marks)
            if name in over_lines:
                yield _make_parameter(f"{family} {name}", *lines[number % len(lines)], grid_only or marks)


def find_module(family: str, name: str) -> str:
    """The module of a script."""
    if family == "keras":
        return SCRIPTS[name].run.build.__module__
    return name.partition(".")[0] if family == "loops" else family


def _make_parameter(name: str, cut: Cut, line: str, marks: Any) -> Any:
    way = f"{cut.stages} stages, {cut.micro_batches} micro-batches{', ' + cut.schedule if line else ''}"
    return pytest.param(name, cut, line, marks=marks, id=f"{name}: {way}")


MATRIX = list(list_cases())


@pytest.mark.parametrize(("name", "cut", "line"), MATRIX)
def test_cut_case_trains_as_the_uncut_one(
    name: str, cut: Cut, line: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut.stages % 2 == 0:
        monkeypatch.setattr(compiled, "MIN_ORDERED_BYTES", 1)  # every variable counts as a large one
    whole = pytestconfig.getoption("--grid")
    case, expected = find_case(name, whole), run_uncut_case(name, whole)
    nb.shutdown()  # a read of a whole model opens a run
    nb.init(links=line or None)
    found = case.run(cut)
    assert len(found.stages) == cut.stages * case.passes, "no plan was engaged"
    assert_same(expected, found, case.tolerance, case.length)


def test_sample_covers_the_matrix() -> None:
    """Every number of stages and of micro-batches, every schedule, every module of Keras scripts."""
    sample = [parameter.values for parameter in MATRIX if not parameter.marks]
    assert {(cut.stages, cut.micro_batches) for _, cut, line in sample if not line} >= {
        (stages, micro) for stages in (1, 2, 3) for micro in (1, 2, 3)
    }
    assert {cut.schedule for _, cut, line in sample if line} == set(SCHEDULES)
    named = [name.partition(" ") for name, *_ in sample]
    assert {find_module(family, name) for family, _, name in named if family == "keras"} == {
        module.__name__ for module in KERAS
    }


def test_traps_are_cases() -> None:
    assert {name.rpartition(" ")[2].rpartition(".")[2] for name in CASES} >= TRAPS


def test_comparison_detects_a_changed_output() -> None:
    """The same case with another batch is not the same."""
    one, other = CASES["loops edited.scaled"].run(Cut(0)), CASES["loops edited.scaled"].run(Cut(2, 2))
    assert_same(one, other)
    other.outputs[0] = other.outputs[0] * (1.0 + 1e-4)
    with pytest.raises(AssertionError, match="outputs/0"):
        assert_same(one, other)
