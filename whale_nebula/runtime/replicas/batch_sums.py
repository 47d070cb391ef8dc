"""Sums over the replicas of a stage in the middle of its functions, by TensorFlow's collectives.

All replicas run the same functions with one micro-batch each, so they come to the same sums in the same order. One that
has no micro-batch, as the batch has too few rows, adds zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.graph import REPLICA_SUM
from whale_nebula.runtime.replicas.collectives import Collectives, Group, groups
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import moments as tf_moments
from whale_nebula.tf import private as tf_private

_KINDS = frozenset({"forward", "backward", "fused"})
_DOING = "the moments of stage {} over its replicas"


@dataclass
class ReplicaSums:
    """The sums of a program's stages on this worker; a group calls them by the number of the program."""

    cut: Cut
    groups: Mapping[int, Group]
    program: int
    _idle: dict[Fragment, Any] = field(default_factory=dict)

    def ops(self, fragment: Fragment) -> tuple[int, ...]:
        """The sums in a fragment, in the order in which all replicas come to them."""
        found = tuple(sorted(op for op in fragment.ops if self.cut.program.graph.ops[op].type == REPLICA_SUM))
        return found if fragment.kind in _KINDS and fragment.stage in self.groups else ()

    def summed(self, fragment: Fragment, marks: Sequence[Any]) -> dict[Any, Any]:
        """In the graph that is being traced, add up what stands for sums, in the order of `ops`; gives by the tensor of
        each what is to be read in its place.
        """
        found = {}
        for (name, spec), mark in zip(self._name_sums(fragment), marks, strict=True):
            own = tf.ensure_shape(mark.op.inputs[0], spec.shape)
            (total,) = self._group(fragment).sum([own], name)
            for reader, place in tf_moments.readers(mark):
                tf_private.set_input(reader, place, total)
            found[mark.ref()] = total
        return found

    def idle(self, fragment: Fragment | None) -> None:
        """Take part in the sums of a fragment without any rows."""
        if fragment is None or not self.ops(fragment):
            return
        if fragment not in self._idle:
            self._idle[fragment] = tf.function(lambda: self._zeros(fragment), autograph=False).get_concrete_function()
        with self.explained(fragment)():
            self._idle[fragment]()

    def _zeros(self, fragment: Fragment) -> list[Any]:
        """Each after the one before, as others may be."""
        totals: list[Any] = []
        for name, spec in self._name_sums(fragment):
            with tf.control_dependencies(totals[-1:]):
                totals += self._group(fragment).sum([tf.zeros(spec.shape, spec.dtype)], name)
        return totals

    def explained(self, fragment: Fragment) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Inside, what fails because a replica is gone says so."""
        key = self.cut.program.stages[fragment.stage or 0].key
        return lambda: self._group(fragment).collectives.explained(_DOING.format(repr(key)))

    def _group(self, fragment: Fragment) -> Group:
        return self.groups[fragment.stage or 0]

    def _name_sums(self, fragment: Fragment) -> list[tuple[str, Spec]]:
        """The sums of a fragment, each by a name that no other has, with its form."""
        spec, about = self.cut.program.graph.spec, f"{self.program} {fragment.phase} {fragment.stage} {fragment.kind}"
        return [(f"{about} {number}", spec(Value(op))) for number, op in enumerate(self.ops(fragment))]


def replica_sums(cut: Cut, worker: str, collectives: Collectives | None, program: int) -> ReplicaSums | None:
    """Those of a worker; None where no function of its stages has any."""
    found = groups(cut, worker, collectives, f"moments of program {program}")
    return ReplicaSums(cut, found, program) if found else None
