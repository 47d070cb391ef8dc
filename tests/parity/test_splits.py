"""Sharded models train like whole ones: models, numbers of devices, stages, micro-batches and replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity.split_models import MODELS, SIBLINGS, STAGES, WHOLE_BATCH, Split
from tests.parity_harness import Case, Cut, Outcome, assert_same, data, run_uncut
from whale_nebula.runtime.step import compiled

SAMPLE = frozenset((
    "words over 4: 2 stages, 2 micro-batches, replicas", "experts over 2: 1 stages, 2 micro-batches",
))  # fmt: skip
"""Tables and experts, over several stages, in micro-batches and replicas. Other layers train in pieces in
`runtime/split/test_lowering`; their models are of the grid here."""
LENGTH = 1e-2 * 4


@functools.cache
def run_uncut_case(name: str) -> Outcome:
    """The uncut run, once for all cases."""
    return run_uncut(Case(lambda cut: MODELS[name](Split(cut, 0))))


def list_cases() -> Iterator[Any]:
    """Every way to run every model."""
    found = []
    for name, count in itertools.product(MODELS, (2, 3, 4)):
        for stages, micro_batches in itertools.product(STAGES.get(name, (1, 2)), (1, 2 if name == "experts" else 4)):
            if micro_batches == 1 or name not in (*WHOLE_BATCH, *SIBLINGS):
                found.append((name, count, Cut(stages, micro_batches)))
        if name not in WHOLE_BATCH | STAGES.keys():
            found.append((name, count, Cut(2, 2, replicas=(2, 1))))
    for name, count, cut in found:
        copies = ", replicas" * bool(cut.replicas)
        about = f"{name} over {count}: {cut.stages} stages, {cut.micro_batches} micro-batches{copies}"
        marks = () if about in SAMPLE else (pytest.mark.grid,)
        yield pytest.param(name, count, cut, marks=marks, id=about)


@pytest.mark.parametrize(("name", "count", "cut"), list(list_cases()))
def test_split_model_trains_as_the_whole_one(name: str, count: int, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    if count % 2 == 0:
        monkeypatch.setattr(compiled, "MIN_ORDERED_BYTES", 1)  # every variable counts as a large one
    expected = run_uncut_case(name)
    nb.shutdown()
    assert_same(expected, MODELS[name](Split(cut, count)), "sums", LENGTH)


def test_split_table_is_gathered_by_rows() -> None:
    """Each row of indices in its own table."""
    table, numbers = tf.Variable(data(3, 5, 2), name="table"), tf.constant([[4, 0], [1, 2], [3, 3]])

    @nb.function
    def step(numbers: Any) -> Any:
        with nb.cluster(), nb.split(2, axis=1):
            return tf.gather(table, numbers, batch_dims=1)

    np.testing.assert_array_equal(step(numbers), tf.gather(table, numbers, batch_dims=1))
    assert nb.plan(step, numbers).layouts["table"] == "split(1)"


def test_sample_is_part_of_the_matrix() -> None:
    assert sum(not parameter.marks for parameter in list_cases()) == len(SAMPLE)
