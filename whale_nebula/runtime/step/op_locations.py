"""Source locations of ops that failed during a step, without further parts of TensorFlow's message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from whale_nebula.capture.errors import baked_reshape
from whale_nebula.capture.places import place_of
from whale_nebula.ir.program import Stage
from whale_nebula.tf import private as tf_private

_NAMED = re.compile(r"Detected at node (\S+) defined at|\{\{node (\S+?)\}\}|\{\{function_node (\S+?)\}\}")
_SHAPES = re.compile(r"but the requested shape|[Ii]ncompatible shapes|[Dd]imensions? (?:.* )?must")


class Whereabouts:
    """The user's lines behind the ops of a traced graph, the clusters of its stages, and how many phases it has."""

    def __init__(self, graph: Any = None, stages: Sequence[Stage] = (), phases: int = 1) -> None:
        self._graph = graph
        self.phases = phases
        self._clusters = {stage.key: stage.cluster for stage in stages}

    def of(self, failure: BaseException, stage: str = "") -> str:
        """The op that failed, its line in the user's code, and the cluster."""
        name = op_of(failure)
        cluster = self._clusters.get(stage)
        parts = [f"op {name!r}" if name else "", self.line(name), f"cluster {cluster!r}" if cluster else ""]
        return ", ".join(part for part in parts if part)

    def line(self, name: str) -> str:
        """The user's line that made an op, or the op that it is the gradient of; '' where none is known.

        An op of a branch, or of a loop's body, stands where the branch or the loop does.
        """
        op = next((self._operations[each] for each in _around(name) if each in self._operations), None)
        place = "" if op is None else str(place_of(tf_private.forward_op(op)))
        return "" if op is None or place == op.name else place

    def mend(self, failure: BaseException) -> str:
        """What to write: where shapes do not fit, a batch size that is baked in may be why."""
        shapes = _SHAPES.search(str(getattr(failure, "message", failure)))
        baked = baked_reshape(self._graph) if shapes else None
        if baked is None:
            return "correct the input or the op"
        return f"{baked.mend} at {baked.line}, where the batch size {baked.sizes[0]} is baked in"

    @cached_property
    def _operations(self) -> dict[str, Any]:
        return {} if self._graph is None else {op.name: op for op in self._graph.get_operations()}


def _around(name: str) -> list[str]:
    """An op's name, then those of the ops in whose branch it may stand, from the inside to the outside.

    >>> _around("m/Assert/AssertGuard/Assert")
    ['m/Assert/AssertGuard/Assert', 'm/Assert/AssertGuard', 'm/Assert', 'm']
    """
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def op_of(failure: BaseException) -> str:
    """The op that failed, as TensorFlow names it."""
    found = _NAMED.search(str(getattr(failure, "message", failure)))
    return "" if found is None else next(name for name in found.groups() if name)
