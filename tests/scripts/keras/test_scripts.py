"""A sample of the registry: each script once, cut in one way. `benchmarks/parity` runs the grid.

`make test` runs what is not in `GRID`; `--grid` all of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import whale_nebula as nb
from tests.parity.zoo import Cut
from tests.scripts.keras.models import MODULES, SCRIPTS, check

LINE = "1gbit,0ms"
LOCAL = {
    "nested_spanning": (3, 2),
    "own_steps": (2, 3),
    "autoencoder": (2, 1),
    "distiller": (2, 2),
    "class_weight": (2, 3),
    "mask_pooling": (2, 3),
    "penalty_sum_added": (2, 3),
    "optimizer_accumulates_and_clips": (2, 3),
    "mixed_float16_overflows": (2, 2),
    "metrics_of_classes": (2, 3),
    "halve_the_rate": (2, 2),
    "thaw_and_compile": (2, 2),
    "fed_four_parts": (2, 2),
    "early_stopping": (2, 2),
    "language_model": (2, 3),
}
"""Links are free: the step is one function."""
EMULATED = {
    "shared_over_stages": (3, 3),
    "two_optimizers": (2, 2),
    "outputs_in_a_dict": (2, 3),
    "sparse_global_clipnorm": (2, 3),
    "dropout": (2, 1),
}
"""Actors over memory links."""
GRID = ("thaw_and_compile", "distiller", "autoencoder", "class_weight")
"""Much like others in what they prove, and slow."""
LOOKING = ("nested_spanning", "own_steps", "mask_pooling")
"""Here `evaluate` and `predict` are compared too."""
ELSEWHERE = ("mixture",)
"""Modules whose scripts run in `benchmarks/parity` alone."""


@pytest.fixture(autouse=True)
def closed():
    """Every test opens its own run."""
    nb.shutdown()
    yield
    nb.shutdown()


def _check(name: str, cut: Cut) -> None:
    script = SCRIPTS[name]
    assert cut.stages in script.stages
    assert cut.micro_batches in script.micro
    plain = script.run(Cut(0), looking=name in LOOKING)
    found = script.run(cut, looking=name in LOOKING)
    assert len(found.stages) == cut.stages
    check(plain, found, script)


def cases(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.grid if name in GRID else ()) for name in names]


@pytest.mark.parametrize("name", cases(LOCAL))
def test_local(name: str) -> None:
    _check(name, Cut(*LOCAL[name]))


@pytest.mark.parametrize("name", cases(EMULATED))
def test_emulated(name: str) -> None:
    nb.init(links=LINE)
    _check(name, Cut(*EMULATED[name]))


def test_every_module_is_sampled() -> None:
    sampled = {SCRIPTS[name].build.__module__.rpartition(".")[2] for name in (*LOCAL, *EMULATED) if name not in GRID}
    assert sampled | set(ELSEWHERE) == {module.__name__.rpartition(".")[2] for module in MODULES}
