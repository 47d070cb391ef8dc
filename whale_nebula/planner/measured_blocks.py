"""Blocks of a program as subgraphs that can be run alone, and their seconds measured on one device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whale_nebula.hardware.measured import fit_line
from whale_nebula.ir.canonical import subgraph_text
from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.graph import CAPTURE, Op
from whale_nebula.ir.program import Program
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.effects import is_check, is_effect, written_handles
from whale_nebula.plain import to_plain
from whale_nebula.planner.chain import BlockOps
from whale_nebula.planner.problem import Array
from whale_nebula.spec import Value

KINDS = ("forward", "backward", "update", "fused")
"""The functions of blocks that are measured; the last one, forward and backward together, only for all blocks."""
Points = dict[int, float]
"""Seconds by the rows of the batch."""


@dataclass(frozen=True)
class MeasuredBlocks:
    """Two numbers for each block, the seconds of a call and of each row, and last for all blocks together; NaN if not
    measured. `fused` is for all blocks with forward and backward as one function. `adding` are the seconds of adding
    two tensors for each byte of one, `call` those of an empty call, on this number of `cores`.

    >>> found = MeasuredBlocks.of({"forward": {1: {4: 6.0, 8: 10.0}}, "backward": {}, "update": {}}, 2)
    >>> found.forward.tolist(), MeasuredBlocks.from_plain(found.to_plain(), 2).forward[1, 1].item()
    ([[nan, 2.0, nan], [nan, 1.0, nan]], 1.0)
    """

    forward: Array
    backward: Array
    update: Array
    fused: Array
    adding: float = math.nan
    call: float = math.nan
    cores: int = 1

    @classmethod
    def of(
        cls,
        points: Mapping[str, Mapping[int, Points]],
        count: int,
        adding: float = math.nan,
        call: float = math.nan,
        cores: int = 1,
    ) -> MeasuredBlocks:
        """Fit a line to the seconds of each block: `points` are by kind, block (-1 for all) and rows."""
        made = {kind: np.full((2, count + 1), np.nan) for kind in KINDS}
        for kind, blocks in points.items():
            for block, seconds in blocks.items():
                made[kind][:, block] = fit_line([(float(rows), max(each, 1e-9)) for rows, each in seconds.items()])
                if kind == "update":  # it is independent of rows
                    made[kind][:, block] = min(seconds.values()), 0.0
        return cls(**made, adding=adding, call=call, cores=cores)

    def has(self, way: int, block: int) -> bool:
        """Whether the forward (0) or the backward (1) of a block was measured."""
        return not np.isnan((self.forward, self.backward)[way][0, block])

    def to_plain(self) -> dict[str, Any]:
        """The form for JSON, without blocks that were not measured."""
        return {"adding": to_plain(self.adding), "call": to_plain(self.call), "cores": self.cores} | {
            kind: {str(block): [float(each) for each in own[:, block]] for block in np.flatnonzero(~np.isnan(own[0]))}
            for kind, own in ((kind, getattr(self, kind)) for kind in KINDS)
        }

    @classmethod
    def from_plain(cls, plain: Any, count: int) -> MeasuredBlocks:
        """Parse the result of `to_plain`, or a peer's message; invalid entries are left out."""
        made = {kind: np.full((2, count + 1), np.nan) for kind in KINDS}
        for kind, own in made.items():
            given = plain.get(kind) if isinstance(plain, dict) else None
            for block, pair in (given if isinstance(given, dict) else {}).items():
                if block.isdecimal() and int(block) <= count and len(pair) == 2:
                    own[:, int(block)] = pair
        others = plain if isinstance(plain, dict) else {}
        adding, call = (each if isinstance(each, float) else math.nan for each in map(others.get, ("adding", "call")))
        cores = others.get("cores")
        return cls(**made, adding=adding, call=call, cores=max(cores, 1) if isinstance(cores, int) else 1)


def slowest_of(every: Sequence[MeasuredBlocks], rows: int) -> MeasuredBlocks | None:
    """The measurements of the slowest device of a cluster; None if none has measured."""
    known = [each for each in every if not np.isnan(each.forward[0]).all()]
    return max(known, key=lambda each: _total(each, rows), default=None)


def _total(each: MeasuredBlocks, rows: int) -> float:
    ways = (each.forward, each.backward)
    return float(sum(np.nansum(way[0]) + rows * np.nansum(way[1]) for way in ways))


*_APART, _FUSED = KINDS
WHOLE = -1
"""The number of all blocks together."""


@dataclass(frozen=True)
class Subgraph:
    """A block's forward, backward or update as a fragment. Subgraphs of the same `text` compute the same."""

    kind: str
    block: int
    fragment: Fragment
    text: str

    def key(self, sizes: Sizes, settings: str) -> str:
        """The key of a measurement, from the text, the sizes of a batch, and TensorFlow's `settings`."""
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
        """The kind and the block of each op that belongs to one."""
        kinds = zip(_APART, (self.ops.forward, self.ops.backward, self.ops.update), strict=True)
        return {op: (kind, block) for kind, blocks in kinds for block, own in enumerate(blocks) for op in own}

    @cached_property
    def after(self) -> set[int]:
        """The ops that depend on gradients."""
        return self.program.graph.descend(self.program.holders)

    @cached_property
    def gradients(self) -> frozenset[Value]:
        """The results of the backward."""
        return frozenset(v for request in self.program.requests for part in request.parts for v in part.values)

    def subgraph(self, kind: str, block: int, own: Sequence[int]) -> Iterator[Subgraph]:
        """The subgraph of these ops, if they can be run."""
        fragment = self._fragment(kind, own)
        if fragment is not None:
            text = subgraph_text(self.program.graph, fragment.ops, fragment.feeds, fragment.fetches)
            yield Subgraph(kind, block, fragment, text)

    def _fragment(self, kind: str, own: Sequence[int]) -> Fragment | None:
        """The ops of a block, with those of their inputs that depend neither on the batch nor on gradients."""
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
        """Whether an op is computed in every block that reads it, such as reads of variables and constants."""
        program = self.program
        depends = op.index in program.of_batch or op.index in self.after or program.request_of(op.index) is not None
        return not (depends or op.role or is_effect(op, program.graph))

    def _is_refused(self, op: Op) -> bool:
        """Whether an op has side effects that a copy of the variables does not contain."""
        graph = self.program.graph
        if not is_effect(op, graph) or is_check(op, graph):
            return False
        handles = written_handles(op, graph)
        return not handles or any(handle not in self.program.variable_ops for handle in handles)

    def _is_wanted(self, value: Value, inside: set[int]) -> bool:
        """Whether ops outside the block read a value."""
        if value in self.gradients:
            return True
        readers = (reader.index for reader in self.program.graph.consumers(value))
        return any(reader in self.homes and reader not in inside for reader in readers)
