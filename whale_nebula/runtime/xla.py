"""Which pieces of a step XLA compiles, where a model was compiled with jit_compile=True.

A stage's forward and backward are compiled, each alone; communication and updates never are. Loops and conditions
are not: their forwards hand lists to their backwards that XLA cannot give away. What it does not take runs as
without it, and the report says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.program import Stage
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private

_KINDS = frozenset({"forward", "backward", "fused"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# XLA has kernels for these, but gives checks up, and cannot tell how long the results of the others are
_LEFT_OUT = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2", "Where", "Unique", "UniqueV2", "ListDiff"})
_NOT_HELD = frozenset({"variant", "string"})
_REFUSAL = re.compile(r"XLA|tf2xla|compile-time constant|[Nn]ot compilable|uncompilable")


@dataclass
class Xla:
    """Decides for the fragments of one plan, and takes down what it decided against."""

    graph: Graph
    stages: Sequence[Stage]
    notes: list[str] = field(default_factory=list)

    def takes(self, fragment: Fragment) -> bool:
        """Whether a fragment is compiled."""
        if fragment.kind not in _KINDS or fragment.stage is None:
            return False
        obstacle = next(self._obstacles(fragment), None)
        if obstacle is not None:
            self._note(f"stage {self.stages[fragment.stage].key!r} is not compiled by XLA: it holds {obstacle}")
        return obstacle is None

    def give_up(self, failure: BaseException) -> None:
        """XLA refused something that it has kernels for."""
        self._note(f"nothing is compiled by XLA: {_first_line(failure)}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _obstacles(self, fragment: Fragment) -> Iterator[str]:
        ops = [self.graph.ops[op] for op in fragment.ops]
        yield from _bad_ops(self.graph, ops)
        yield from _bad_values(self.graph, (*fragment.feeds, *fragment.fetches))


def _bad_ops(graph: Graph, ops: Collection[Op]) -> Iterator[str]:
    for op in ops:
        if op.functions and op.type in _CALLS:
            yield from _bad_ops(graph.functions[op.functions[0]], graph.functions[op.functions[0]].ops)
        elif op.functions or op.type in _LEFT_OUT or not (op.role or _has_kernel(op)):
            yield f"{op.type} ({op.name})"


def _has_kernel(op: Op) -> bool:
    return op.type == "Placeholder" or tf_private.xla_takes(op.type, gpu=bool(tf.config.list_physical_devices("GPU")))


def _bad_values(graph: Graph, values: Sequence[Value]) -> Iterator[str]:
    for value in values:
        if graph.spec(value).dtype in _NOT_HELD:
            yield f"a {graph.spec(value).dtype} ({graph.ops[value.op].name})"


def refused_by_xla(failure: BaseException) -> bool:
    """Whether a step failed because XLA could not compile a piece of it."""
    return _REFUSAL.search(_text(failure)) is not None


def _text(failure: BaseException) -> str:
    cause = failure.__cause__ or failure
    return str(getattr(cause, "message", cause))


def _first_line(failure: BaseException) -> str:
    return next((line.strip() for line in _text(failure).splitlines() if _REFUSAL.search(line)), "")[:200]
