"""A trained translator as a function: source ids in, in the source's cluster; translations out, in the target's."""

from __future__ import annotations

from typing import Any

from whale_nebula.runtime.function import NebulaFunction, function

from .found import Found


def translation(model: Any, search: Any) -> NebulaFunction:
    """A function under `nb.function` that translates a batch: `translate(ids)` is a `Found`.

    `search` is a `Beam` for models that write from left to right, a `MaskPredict` for those that fill in. It runs where
    the model's scopes say; without any, it is plain TensorFlow.

    In several processes the target's cluster has no source: there it is `translate(None, rows)`, elsewhere
    `translate(ids, rows)`, with any number for each row, so that every cluster knows how many there are.
    """

    def translate(source: Any, rows: Any = None) -> Found:
        found: Found = model(source, search=search)
        return found

    made: NebulaFunction = function(translate)
    return made
