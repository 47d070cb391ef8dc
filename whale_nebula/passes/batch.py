"""What cutting the batch into micro-batches asks of the step: how forward values become one again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whale_nebula.ir.program import Program
from whale_nebula.ir.spec import Value


@dataclass(frozen=True)
class BatchFolds:
    """`once` are ops that wait for merged values, `wholes` values of the inputs computed on the whole batch."""

    once: frozenset[int] = frozenset()
    wholes: frozenset[Value] = frozenset()
    rules: Mapping[Value, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cut: bool = False

    def merge(self, value: Value) -> str:
        """How a forward value of every micro-batch becomes one; with a single one there is nothing to do."""
        return self.rules.get(value, "last") if self.cut else "only"

    def layout(self, value: Value) -> str:
        """How a boundary lies on the micro-batches: by rows, or the same in each."""
        return "whole" if self.rules.get(value) == "same" else "rows"


def fold_batch(program: Program, where: Callable[[int], str] = lambda op: "") -> BatchFolds:
    """Classify the forward's values where the batch is cut; with one micro-batch nothing needs to be known."""
    return BatchFolds()
