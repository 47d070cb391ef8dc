"""Every model of the zoo, cut in every way, gives what the uncut model gives."""

from __future__ import annotations

import functools
import importlib.util
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


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_local(name: str, stages: int, micro_batches: int) -> None:
    """All stages in one process, links free: the step is one function."""
    _check(name, zoo.Cut(stages, micro_batches), stages=stages)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_schedules(name: str, schedule: str) -> None:
    """Actors over memory links, three stages: the result does not depend on the schedule."""
    nb.init(links=EMULATED)
    _check(name, zoo.Cut(3, 3, schedule), stages=3)
