"""A fragment of the traced graph becomes a TensorFlow function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import Donor, plant
from whale_nebula.ir.cut import Fragment
from whale_nebula.passes.unbundle import Aliases
from whale_nebula.runtime.replica_sums import ReplicaSums
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private


@dataclass(frozen=True)
class Function:
    """A fragment that can be called: tensors of `feeds` in, tensors of `fetches` out. One that `waits` holds sums over
    replicas, and is called inside of it.
    """

    fragment: Fragment
    concrete: Any
    captured: Sequence[Any]
    waits: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Run it."""
        with contextlib.nullcontext() if self.waits is None else self.waits():
            return tf_private.call_flat(self.concrete, tensors, self.captured)


class Workshop:
    """Makes functions out of one traced graph, which it reads once; `aliases` are values to read for others.

    XLA compiles the fragments that `compiles` says yes to. Where replicas are processes, `sums` are those over them.
    """

    def __init__(
        self,
        graph: Any,
        aliases: Aliases | None = None,
        compiles: Callable[[Fragment], bool] = lambda fragment: False,
        sums: ReplicaSums | None = None,
    ) -> None:
        self.graph = graph
        self.sums = sums
        self._compiles = compiles
        self._donor = Donor(graph)
        self._donor.rename(aliases or {})
        self._external = {internal.op.name: external for external, internal in graph.captures}

    def make(self, fragment: Fragment) -> Function:
        """Build the function of a fragment."""
        operations = [self._donor.operations[index] for index in fragment.ops]
        feeds = [self._donor.tensor(value) for value in fragment.feeds]
        fetches = [self._donor.tensor(value) for value in fragment.fetches]
        definition = self._donor.cut(fragment.ops)
        used = {t.op.name for op in operations for t in op.inputs} | {t.op.name for t in fetches}
        captures = {name: self._external[name] for name in used if name in self._external}
        summed = () if self.sums is None else self.sums.ops(fragment)

        def body(*tensors: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            known = {tensor.name: given for tensor, given in zip(feeds, tensors, strict=True)}
            known |= {f"{name}:0": graph.capture(external) for name, external in captures.items()}
            marks = [self._donor.tensor(Value(op)) for op in summed]
            found = plant(definition, known, [tensor.name for tensor in (*fetches, *marks)])
            return self._with_sums(fragment, found[: len(fetches)], found[len(fetches) :])

        signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in feeds]
        body.__name__ = _name(fragment)
        xla = self._compiles(fragment) or None
        traced = tf.function(body, input_signature=signature, autograph=False, jit_compile=xla)
        concrete = traced.get_concrete_function()
        waits = self.sums.explained(fragment) if self.sums is not None and summed else None
        return Function(fragment, concrete, concrete.captured_inputs, waits)

    def _with_sums(self, fragment: Fragment, fetches: list[Any], marks: list[Any]) -> list[Any]:
        """What is fetched, once what stands for sums over replicas is summed."""
        found = self.sums.summed(fragment, marks) if self.sums is not None and marks else {}
        return [found.get(tensor.ref(), tensor) for tensor in fetches]


def _name(fragment: Fragment) -> str:
    stage = "" if fragment.stage is None else f"_stage{fragment.stage}"
    return f"{fragment.kind}{stage}_phase{fragment.phase}"
