"""A plan's note on a compress scope without effect, with its line."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

import whale_nebula as nb

ROWS = np.ones((4, 8), "float32")


def line(function: Any, text: str) -> str:
    """Where a function says something."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{next(first + number for number, each in enumerate(lines) if text in each)}"


def notes(function: Any) -> list[str]:
    return [note for note in nb.plan(nb.function(function), ROWS).notes if "nb.compress at" in note]


def both(rows: Any) -> Any:
    with nb.stage(cluster="a"), nb.compress(fp16=True):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"), nb.compress(int8=True):
        return hidden + 1.0


def consumer(rows: Any) -> Any:
    with nb.stage(cluster="a"):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"), nb.compress(int8=True):
        return hidden + 1.0


def nested(rows: Any) -> Any:
    with nb.compress(int4=True):
        with nb.stage(cluster="a"), nb.compress(fp16=True):
            hidden = 2.0 * rows
        with nb.stage(cluster="b"):
            return hidden + 1.0


def last(rows: Any) -> Any:
    with nb.stage(cluster="a"), nb.compress(fp16=True):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"):
        hidden = hidden + 1.0
        with nb.compress(bf16=True):
            return hidden * hidden


def test_one_around_the_consumer_gives_way_with_both_lines() -> None:
    there, here = line(both, "int8"), line(both, "fp16")
    assert notes(both) == [f"b0: nb.compress at {there} does not count: what makes the tensor stands in one, at {here}"]
    assert notes(nested) == [
        f"b0: nb.compress at {line(nested, 'int4')} does not count: "
        f"what makes the tensor stands in one, at {line(nested, 'fp16')}"
    ]


def test_one_that_nothing_crosses_under_says_so() -> None:
    where = line(last, "bf16")
    assert notes(last) == [f"nb.compress at {where} changes nothing: no tensor that crosses comes under it"]


def test_one_that_counts_says_nothing() -> None:
    assert notes(consumer) == []
