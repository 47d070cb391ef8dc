"""Blocks of a program as subgraphs that can be run by themselves, keyed by what they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale_nebula.ir.canonical import subgraph_text
from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.graph import CAPTURE, Op
from whale_nebula.ir.program import Program
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.effects import is_check, is_effect, written_handles
from whale_nebula.planner.chain import BlockOps
from whale_nebula.planner.measured_blocks import KINDS
from whale_nebula.spec import Value

*_APART, _FUSED = KINDS
WHOLE = -1
"""What stands for all blocks together where one has its number."""


@dataclass(frozen=True)
class Subgraph:
    """What a block does in its forward, its backward or its update, as a fragment. Those of the same `text` compute the
    same.
    """

    kind: str
    block: int
    fragment: Fragment
    text: str

    def key(self, sizes: Sizes, settings: str) -> str:
        """What identifies it with what it is fed, given the sizes of a batch and how TensorFlow is set up."""
        shapes = [sizes.shape(value) for value in self.fragment.feeds]
        return hashlib.sha256(f"{self.text}\n{shapes}\n{settings}".encode()).hexdigest()[:32]


def subgraphs_of(program: Program, ops: BlockOps) -> Iterator[Subgraph]:
    """The subgraphs of a program's blocks, and of all together; one with an effect on more than variables is left
    out.
    """
    making = _Making(program, ops)
    for kind, blocks in zip(_APART, (ops.forward, ops.backward, ops.update), strict=True):
        every = tuple(sorted(op for own in blocks for op in own))
        for block, own in ((WHOLE, every), *enumerate(blocks)):
            yield from making.subgraph(kind, block, own)
    yield from making.subgraph(
        _FUSED, WHOLE, [op for blocks in (ops.forward, ops.backward) for own in blocks for op in own]
    )


@dataclass(frozen=True)
class _Making:
    program: Program
    ops: BlockOps

    @cached_property
    def homes(self) -> dict[int, tuple[str, int]]:
        """The kind and the block of each op that has them."""
        kinds = zip(_APART, (self.ops.forward, self.ops.backward, self.ops.update), strict=True)
        return {op: (kind, block) for kind, blocks in kinds for block, own in enumerate(blocks) for op in own}

    @cached_property
    def after(self) -> set[int]:
        """The ops that depend on gradients."""
        return self.program.graph.descend(self.program.holders)

    @cached_property
    def gradients(self) -> frozenset[Value]:
        """What the backward is there for."""
        return frozenset(v for request in self.program.requests for part in request.parts for v in part.values)

    def subgraph(self, kind: str, block: int, own: Sequence[int]) -> Iterator[Subgraph]:
        """The subgraph of these ops, if they can be run."""
        fragment = self._fragment(kind, own)
        if fragment is not None:
            text = subgraph_text(self.program.graph, fragment.ops, fragment.feeds, fragment.fetches)
            yield Subgraph(kind, block, fragment, text)

    def _fragment(self, kind: str, own: Sequence[int]) -> Fragment | None:
        """The ops of a block with what they read that depends neither on the batch nor on gradients."""
        graph = self.program.graph
        own = [op for op in own if not graph.ops[op].role]
        inside = set(own)
        stack = [value.op for op in own for value in graph.ops[op].inputs]
        while stack:
            op = graph.ops[stack.pop()]
            if op.index not in inside and self._is_shared(op):
                inside.add(op.index)
                stack += [value.op for value in op.inputs]
        if not own or any(self._is_refused(graph.ops[op]) for op in inside):
            return None
        ops = tuple(sorted(inside))
        read = {value for op in ops for value in graph.ops[op].inputs if value.op not in inside}
        feeds = sorted(value for value in read if graph.ops[value.op].role != CAPTURE)
        fetches = [value for op in own for value in graph.ops[op].values if self._is_wanted(value, inside)]
        return Fragment(kind, 0, None, "", 0, ops, tuple(feeds), tuple(fetches))

    def _is_shared(self, op: Op) -> bool:
        """Whether an op is computed wherever it is read, as reads of variables and constants are."""
        program = self.program
        depends = op.index in program.of_batch or op.index in self.after or program.request_of(op.index) is not None
        return not (depends or op.role or is_effect(op, program.graph))

    def _is_refused(self, op: Op) -> bool:
        """Whether it does something that a copy of variables does not keep from the user's own."""
        graph = self.program.graph
        if not is_effect(op, graph) or is_check(op, graph):
            return False
        handles = written_handles(op, graph)
        return not handles or any(handle not in self.program.variable_ops for handle in handles)

    def _is_wanted(self, value: Value, inside: set[int]) -> bool:
        """Whether others read a value."""
        if value in self.gradients:
            return True
        readers = (reader.index for reader in self.program.graph.consumers(value))
        return any(reader in self.homes and reader not in inside for reader in readers)
