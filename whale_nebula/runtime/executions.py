"""One call by Keras may be several steps: `compile(steps_per_execution=n)`. Here each of them runs by itself.

Keras would put them into one loop of TensorFlow's. A step that ends with an exchange between clusters cannot lie in
it; what Keras sees is the same all the same: the results of the last step, and callbacks every n steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import tensorflow as tf

Run = Callable[[Any], Any]


def training(run: Run, model: Any) -> Callable[[Iterator[Any]], Any]:
    """What Keras calls with its iterator, to train or to evaluate."""

    def execute(iterator: Iterator[Any]) -> Any:
        batches = islice(iterator, model.steps_per_execution)
        results = run(next(batches))
        for batch in batches:
            results = run(batch)
        return results

    return execute


def predicting(run: Run) -> Callable[[Sequence[Any]], Any]:
    """What Keras calls with a list of batches, to predict."""

    def execute(batches: Sequence[Any]) -> Any:
        if not isinstance(batches, list):
            return run(batches)
        found = [run(batch) for batch in batches]
        return found[0] if len(found) == 1 else tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *found)

    return execute


def note(model: Any) -> str:
    """What the report says of it."""
    count = model.steps_per_execution
    return f"steps_per_execution={count}: the {count} steps of an execution run one by one" if count > 1 else ""
