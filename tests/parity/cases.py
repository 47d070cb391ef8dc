"""Every parity case of the tests by its name: models, Keras scripts, custom loops and placed models."""

from __future__ import annotations

from collections.abc import Iterator

from tests.parity.zoo import ZOO
from tests.parity_harness import Case, Cut
from tests.scripts.keras import (
    callbacks,
    feeding,
    masks,
    metrics,
    mixture,
    nesting,
    optimizers,
    outputs,
    penalties,
    precision,
    retraining,
    state,
    steps,
    workloads,
)
from tests.scripts.keras.script import SCRIPTS
from tests.scripts.loops.loop_scripts import load_scripts
from tests.scripts.place import models

KERAS = (
    nesting, steps, outputs, masks, penalties, optimizers, precision, metrics, state, retraining, feeding, callbacks,
    mixture, workloads,
)  # fmt: skip
"""Importing them registers their scripts."""

FAMILIES: dict[str, dict[str, Case]] = {"zoo": ZOO, "keras": SCRIPTS, "loops": load_scripts(), "place": models.CASES}
CASES = {f"{family} {name}": case for family, cases in FAMILIES.items() for name, case in cases.items()}

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble")
LINE = "10gbit,0ms"
"""Links take no time, and all stages are actors. Without it the step is one function."""


def list_cuts(case: Case) -> Iterator[tuple[Cut, str]]:
    """Every cut of a case, and the line it runs over, or none."""
    for stages in case.stages:
        for micro_batches in case.micro:
            yield Cut(stages, micro_batches), ""
    for schedule in SCHEDULES:
        yield Cut(max(case.stages), max(case.micro), schedule), LINE
