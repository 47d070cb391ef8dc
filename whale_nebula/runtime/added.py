"""Gradients of a stage's replicas, added up by TensorFlow's own collectives where the replicas can have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.ir.plan import Cut
from whale_nebula.passes.mates import Told
from whale_nebula.runtime.collectives import DTYPES, Collectives, Group
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.stage_run import StageRun


@dataclass
class Added:
    """The groups of replicas, by stage; a group calls its sums by the number of the program."""

    cut: Cut
    groups: Mapping[int, Group]
    program: int
    _shapes: dict[Told, tuple[int, ...] | None] = field(default_factory=dict)

    def takes(self, each: Told) -> bool:
        """Whether this is a sum for TensorFlow: dense, and of a form that the plan knows."""
        if each.kind != "sum" or each.stage not in self.groups:
            return False
        if each not in self._shapes:
            self._shapes[each] = self._shape(each)
        return self._shapes[each] is not None

    def add(self, run: StageRun, told: Sequence[Told]) -> None:
        """Put the sums of all replicas in the place of this one's. One that had no rows adds zeros."""
        chosen = [each for each in told if self.takes(each)]
        if not chosen:
            return
        own = [self._own(run, each) for each in chosen]
        found = self.groups[run.stage].sum(own, f"{self.program} {run.stage} {len(own)}")
        for each, tensor in zip(chosen, found, strict=True):
            run.sums.put(each.key, [(tensor,)])

    def _own(self, run: StageRun, each: Told) -> Any:
        if not run.turns:
            return tf.zeros(self._shapes[each], each.specs[0].dtype)
        return tf.convert_to_tensor(run.sums.dense[each.key])

    def _shape(self, each: Told) -> tuple[int, ...] | None:
        """The form of a dense gradient; None where it is a list of rows, or the form is not known."""
        program, (request, source, stage) = self.cut.program, each.key
        asked = program.requests[request]
        part = next(part for part in asked.parts if (part.source, part.stage) == (source, stage))
        variable = program.variable_ops.get(asked.origins[source])
        shape = each.specs[0].shape if variable is None else variable.spec.shape
        dense = len(part.values) == 1 and variable is not None and each.specs[0].dtype in DTYPES
        if not dense or shape is None or None in shape:
            return None
        return tuple(axis for axis in shape if axis is not None)


def added(compiled: Compiled, collectives: Collectives | None, program: int) -> Added | None:
    """The groups that this worker is in; None where TensorFlow's collectives are not to be had."""
    if collectives is None:
        return None
    cut, own = compiled.cut, compiled.worker
    cluster = next(worker.cluster for worker in cut.workers if worker.name == own)
    tasks = sorted(worker.name for worker in cut.workers if worker.cluster == cluster)
    groups = {}
    for stage in sorted(cut.routing.replicated):
        hosts = cut.routing.of(stage)
        if own in hosts:
            groups[stage] = collectives.group([tasks.index(host) for host in hosts], f"program {program} stage {stage}")
    return Added(cut, groups, program) if groups else None
