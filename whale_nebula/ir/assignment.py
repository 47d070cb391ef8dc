"""An assignment of variables to stages: what a planner decides, and what a trace is cut by where no scope says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_nebula.ir.program import Pipeline, Stage


@dataclass(frozen=True)
class Assignment:
    """Stages in the order in which tensors go, how the batch is cut, and of each variable, by its path, the stages of
    the ops that read it.

    Those ops stand in the order of the trace; the last stage holds for all that follow. Ops that read no variable go
    where the fewest bytes cross, as those do that no scope has stamped. `codecs` are those of what stages are given.

    >>> given = Assignment((Stage("stage0", "gpu"), Stage("stage1", "npu")), {"table": ("stage0", "stage1")})
    >>> [given.stage_of("table", number) for number in range(3)], given.stage_of("other", 0)
    (['stage0', 'stage1', 'stage1'], None)
    """

    stages: tuple[Stage, ...]
    variables: Mapping[str, tuple[str, ...]]
    pipeline: Pipeline = field(default_factory=Pipeline)
    codecs: Mapping[str, str] = field(default_factory=dict)

    def stage_of(self, path: str, number: int) -> str | None:
        """The stage of the op that is the variable's reader of this number; None where it was not decided."""
        stages = self.variables.get(path)
        return None if stages is None else stages[min(number, len(stages) - 1)]
