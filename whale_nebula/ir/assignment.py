"""An assignment of variables to stages, which a planner decides, and what scopes say to it beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_nebula.ir.program import Pipeline, Stage


@dataclass(frozen=True)
class Written:
    """A stage that scopes have said: on one of `clusters` (none: any), in so many `replicas` (None: any). `said` are
    the words of its scope, with their line.
    """

    key: str
    said: str
    clusters: tuple[str, ...] = ()
    replicas: int | None = None


@dataclass(frozen=True)
class Constraints:
    """What the scopes of a step say: the stages that were written, the clusters that nb.cluster names (none: any), and
    what nb.pipeline and an nb.replica around all say. `unplanned` says why a planner leaves the step as it is.
    """

    stages: tuple[Written, ...] = ()
    clusters: tuple[str, ...] = ()
    pipeline: Pipeline = field(default_factory=Pipeline)
    micro_batch: int | None = None
    replicas: int | None = None
    unplanned: str = ""

    def words(self) -> list[str]:
        """What of it holds, in words.

        >>> Constraints((Written("a", "nb.stage() at train.py:3", ("gpu",), 2),), micro_batch=4).words()
        ['nb.stage() at train.py:3 (gpu, 2 replicas)', '4 micro-batches']
        """
        found = []
        for each in self.stages:
            holds = [" or ".join(each.clusters)] * bool(each.clusters)
            if each.replicas is not None:
                holds.append(f"{each.replicas} replica{'s' * (each.replicas > 1)}")
            found.append(each.said + f" ({', '.join(holds)})" * bool(holds))
        found += [f"the clusters {', '.join(self.clusters)}"] * bool(self.clusters)
        found += [f"{self.replicas} replicas"] * bool(self.replicas and not self.stages)
        return found + [f"{self.micro_batch} micro-batches"] * bool(self.micro_batch)


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
