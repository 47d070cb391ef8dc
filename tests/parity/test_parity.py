"""Every model of the zoo, cut in every way, gives what the uncut model gives.

`make test` runs a sample: each model in one number of stages and of micro-batches, and in three stages by actors in
one schedule; each pair of stages and micro-batches with a model, each schedule with three. `--grid` runs all.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

import whale_nebula as nb


def _load(name: str):
    path = Path(__file__).with_name(f"{name}.py")
    full = f"tests.parity.{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, path)
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


zoo, compare = _load("zoo"), _load("compare")
EMULATED = "10gbit,0ms"


@functools.cache
def plain(name: str):
    """The uncut run, once for all cuts."""
    return zoo.ZOO[name].run(zoo.Cut(0))


@pytest.fixture(autouse=True)
def closed():
    """Every test opens its own run."""
    nb.shutdown()
    yield
    nb.shutdown()


def _check(name: str, cut, *, stages: int) -> None:
    trial = zoo.ZOO[name]
    found = trial.run(cut)
    assert len(found.stages) == stages
    compare.assert_parity(plain(name), found, trial)


CUTS = list(itertools.product((1, 2, 3), (1, 2, 3)))
SCHEDULES = ["gpipe", "1f1b", "eager-1f1b"]


def sampled(number: int) -> tuple[int, int]:
    """The cut that the model of this number always runs in."""
    return CUTS[(number + 3) % len(CUTS)]


def case(*values: object, always: bool) -> object:
    """A test's parameters; what need not run each time is of the grid."""
    return pytest.param(*values, marks=() if always else pytest.mark.grid)


LOCAL = [case(name, *cut, always=cut == sampled(n)) for n, name in enumerate(zoo.ZOO) for cut in CUTS]
ACTORS = [case(name, s, always=m == n % 3) for n, name in enumerate(zoo.ZOO) for m, s in enumerate(SCHEDULES)]


@pytest.mark.parametrize(("name", "stages", "micro_batches"), LOCAL)
def test_local(name: str, stages: int, micro_batches: int) -> None:
    """All stages in one process, links free: the step is one function."""
    _check(name, zoo.Cut(stages, micro_batches), stages=stages)


@pytest.mark.parametrize(("name", "schedule"), ACTORS)
def test_schedules(name: str, schedule: str) -> None:
    """Actors over memory links, three stages: the result does not depend on the schedule."""
    nb.init(links=EMULATED)
    _check(name, zoo.Cut(3, 3, schedule), stages=3)


def test_the_sample_covers_the_grid() -> None:
    """Every pair of stages and micro-batches is there; every model is cut at least once into more than one stage."""
    assert {sampled(number) for number, _ in enumerate(zoo.ZOO)} == set(CUTS)
    by_actors = [param.values for param in ACTORS if not param.marks]
    assert sorted(name for name, _ in by_actors) == sorted(zoo.ZOO)
    assert {schedule for _, schedule in by_actors} == set(SCHEDULES)
